// Which source this program was built from.
#pragma once

namespace mxflash::tools {

const char* commit();  // "cffe200a1b2c", "cffe200a1b2c+dirty", or "unknown" when not built from git

}  // namespace mxflash::tools
