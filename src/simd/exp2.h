// Coefficients of 2^r for r in [-0.5, 0.5]: the minimax polynomial of degree 5 in relative error, 1.5e-7, but for the
// first, which is 1 so that 2^0 is: a softmax maximum that stays leaves sums as they are, to the bit.
#pragma once

namespace mxflash {

inline constexpr float kExp2Poly[6] = {
    1.0f, 6.9314696706e-01f, 2.4022119724e-01f, 5.5507132735e-02f, 9.6755413331e-03f, 1.3276471981e-03f};

}  // namespace mxflash
