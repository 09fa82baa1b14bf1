// What Python's tests call, through ctypes.
#include <string>

#include "tests/accelerator/memory.h"

/// Returns the violations since the last call, one per line. The text lasts until this thread's next call.
extern "C" const char* take_violations() {
  thread_local std::string text;
  text.clear();
  for (const auto& violation : gpipe::accelerator::stream_order().take_violations()) text += violation + "\n";
  return text.c_str();
}

/// Makes this thread wait for all work of a device.
extern "C" void synchronize_device(int device) { gpipe::accelerator::stream_order().synchronize_device(device); }
