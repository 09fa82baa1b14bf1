"""Makes one C++ file of the C++ fragments in the documentation. The test is that it compiles.

    fragments.py PAGE... OUTPUT

A fragment sees the declarations of the earlier fragments on its page. The file includes torch, the pipeline, and the
headers that fragments include or name in a comment such as `// "balance/cut.h"`. To the linker, what gpipe/api.h does not
mark is hidden, as in a library that is built without tests.
"""

import re
import sys
from pathlib import Path

# Declarations that the fragments of a page use without making them.
GIVEN = {
    "start.md": "torch::Tensor x, y;",
    "processes.md": "nn::Sequential model; torch::Tensor x, y; gpipe::LossFunction loss; "
    "std::vector<std::pair<torch::Tensor, torch::Tensor>> batches;",
}
TYPE = re.compile(r"^struct \w+ .*?^};\n(?:TORCH_MODULE\(\w+\);\n)?", re.MULTILINE | re.DOTALL)


def main() -> None:
    *pages, output = map(Path, sys.argv[1:])
    headers = ["<torch/torch.h>", "<torch/csrc/distributed/c10d/Backend.hpp>", "<fstream>", "<iostream>", '"gpipe/gpipe.h"']
    code = "namespace nn = torch::nn;\n"
    for page in pages:
        fragments = re.findall(r"^```c\+\+\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        body = f"void run() {{\n{GIVEN.get(page.name, '')}\n"
        code += f"namespace page_{page.stem} {{\n"
        for fragment in fragments:
            for line in re.findall(r"^(?:#include|//) (.*\.h[\">].*)$", fragment, re.MULTILINE):
                headers += line.split(", ")
            fragment = re.sub(r"^(#include .*|namespace nn = .*)\n", "", fragment, flags=re.MULTILINE)
            code += "".join(TYPE.findall(fragment))
            body += "{\n" + TYPE.sub("", fragment)
        code += body + "}" * len(fragments) + "}\n}\n"
    includes = "".join(f"#include {header}\n" for header in dict.fromkeys(headers))
    includes = includes.replace('#include "', '#pragma GCC visibility push(hidden)\n#include "', 1)
    output.write_text(f"// Made by fragments.py.\n{includes}{code}")


if __name__ == "__main__":
    main()
