#pragma once

/// Marks what libgpipe exports, at its first declaration. Builds without tests hide everything else.
#define GPIPE_API __attribute__((visibility("default")))
