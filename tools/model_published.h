// Designs of others, from their publications and sources, with the speed that they publish: what the model is judged
// by.
#pragma once

#include <string>
#include <vector>

#include "tools/model_chip.h"

namespace mxflash::tools {

struct Published {
  std::string name;
  double pflops = 0;  // published
  double modelled = 0;
  bool fitted = false;  // one of those that `sync` and `smem_share` were fitted on
  double cycles = 0;    // of a tile of 128 x 128 (head_dim 128)
  Work busy{};
  std::string remark;
};
std::vector<Published> published_designs(const Chip& chip);

// The constants that cannot be known but from these designs, fitted to those of them that are `fitted`: by the least
// mean square error, for each rate of tensor memory that may be true.
struct Fit {
  std::string tensor_memory;
  Chip chip{};
  double worst = 0, rms = 0;  // errors
};
std::vector<Fit> fit_constants(const Chip& chip);

// The forward of this library on an H200, measured, in the same model: what the method is worth where there is a card.
std::vector<Published> measured_designs();

// PFLOP/s of `products` matrix products of 128^3 in so many cycles, on all SMs.
double pflops(const Chip& chip, double cycles, int products);

}  // namespace mxflash::tools
