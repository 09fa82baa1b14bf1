"""Makes one C++ file of the fragments in the documentation, which must compile.

    fragments.py PAGE... OUTPUT

A fragment sees what those before it on its page have declared. It gets the headers that it includes or names in a
comment, `// "balance/cut.h"`, and torch and the pipeline itself.
"""

import re
import sys
from pathlib import Path

# What a page takes for granted.
GIVEN = {
    "index.md": "nn::Sequential model; torch::Tensor input, target; torch::nn::MSELoss criterion;",
    "which.md": "nn::Sequential model; torch::Tensor mini_batch;",
    "how_it_works.md": "gpipe::GPipe pipe(nn::Sequential(), {1, 1});",
}
TYPE = re.compile(r"^struct \w+ .*?^};\n(?:TORCH_MODULE\(\w+\);\n)?", re.MULTILINE | re.DOTALL)


def main() -> None:
    *pages, output = map(Path, sys.argv[1:])
    headers = ["<torch/torch.h>", "<fstream>", "<iostream>", '"gpipe/gpipe.h"']
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
    output.write_text(f"// Made by fragments.py.\n{includes}{code}")


if __name__ == "__main__":
    main()
