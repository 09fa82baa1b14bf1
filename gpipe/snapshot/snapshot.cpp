#include "gpipe/snapshot.h"

#include <exception>
#include <stdexcept>

#include "gpipe/snapshot/archive.h"
#include "gpipe/snapshot/content.h"

namespace gpipe {

void write_snapshot(const std::filesystem::path& path, const Snapshot& snapshot) {
  c10::IValue content;
  try {
    content = saveable(to_content(snapshot));
  } catch (const std::exception& error) {
    throw std::runtime_error("cannot write the snapshot '" + path.string() + "': " + error.what());
  }
  write_archive(path, content);
}

Snapshot read_snapshot(const std::filesystem::path& path) {
  try {
    return from_content(read_archive(path));
  } catch (const std::exception& error) {
    throw std::runtime_error("cannot read the snapshot '" + path.string() + "': " + error.what());
  }
}

std::string to_bytes(const Snapshot& snapshot) { return to_archive(saveable(to_content(snapshot))); }

Snapshot from_bytes(std::string_view bytes) { return from_content(from_archive(bytes)); }

}  // namespace gpipe
