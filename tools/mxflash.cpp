// The command line tool: is MXFP8 attention accurate on my tensors, and how fast is it here?
#include <mxflash/backend.h>

#include <iostream>

#include "kit/host_tensor.h"
#include "tools/commands.h"

int main(int argc, char** argv) {
  using namespace mxflash;
  CLI::App app{"MXFP8 block-scaled attention, forward and backward", "mxflash"};
  app.set_version_flag("--version", version());
  app.require_subcommand(1);
  tools::add_info(app);
  tools::add_quantize(app);
  tools::add_attend(app);
  tools::add_check(app);
  tools::add_bench(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    std::cerr << "mxflash: " << kit::one_line(error.what()) << " (see mxflash --help)\n";
    return 2;
  } catch (const tools::CheckFailed&) {
    return 1;
  } catch (const std::bad_alloc&) {
    std::cerr << "mxflash: out of memory; use shorter or fewer sequences\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "mxflash: " << kit::one_line(error.what()) << '\n';
    return 2;
  }
  return 0;
}
