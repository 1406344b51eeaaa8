// The tiles (tests/tcgen05_tile.cuh) that are tested.
#pragma once

#include <gtest/gtest.h>

#include "tcgen05_tile.cuh"

namespace mxflash {

// A in shared and in tensor memory, K-major and MN-major operands, head dimensions 64, 128 and 256, the 144 and 80
// columns of a B with more columns behind 128 and 64, and scales of 64 rows behind those of 64 others.
using TileConfigs =
    testing::Types<tile::Config<128, 128, tile::From::shared, false>, tile::Config<128, 128, tile::From::tensor, false>,
                   tile::Config<128, 128, tile::From::shared, true>, tile::Config<128, 128, tile::From::tensor, true>,
                   tile::Config<64, 128, tile::From::shared, false>, tile::Config<64, 128, tile::From::tensor, false>,
                   tile::Config<128, 64, tile::From::shared, true>, tile::Config<128, 64, tile::From::tensor, true>,
                   tile::Config<64, 64, tile::From::tensor, false>,
                   tile::Config<128, 128, tile::From::shared_mn_major, false>,
                   tile::Config<64, 128, tile::From::shared_mn_major, true>,
                   tile::Config<128, 144, tile::From::tensor, true>, tile::Config<128, 80, tile::From::shared, true>,
                   tile::Config<64, 256, tile::From::tensor, true>, tile::Config<64, 64, tile::From::shared, false, 2>>;

}  // namespace mxflash
