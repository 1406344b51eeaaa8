#include "tools/commit.h"

#include "commit_text.h"  // written by commit.cmake

namespace mxflash::tools {

const char* commit() { return MXFLASH_COMMIT; }

}  // namespace mxflash::tools
