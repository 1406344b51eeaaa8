// The command line tool: is MXFP8 attention accurate on my tensors, and how fast is it here?
#include <mxflash/backend.h>

#include <iostream>

#include "kit/host_tensor.h"
#include "tools/commands.h"

namespace mxflash {
namespace {

int run(int argc, char** argv) {
  CLI::App app{"MXFP8 block-scaled attention, forward and backward", "mxflash"};
  app.set_version_flag("--version", version());
  app.require_subcommand(1);
  tools::add_info(app);
  tools::add_quantize(app);
  tools::add_attend(app);
  tools::add_check(app);
  tools::add_bench(app);
  tools::add_model(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const auto used = app.get_subcommands();
    const std::string command = used.empty() ? "" : used.front()->get_name() + " ";
    std::cerr << "mxflash: " << kit::one_line(error.what()) << " (see mxflash " << command << "--help)\n";
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

}  // namespace
}  // namespace mxflash

int main(int argc, char** argv) {
  const int code = mxflash::run(argc, argv);
  // Results that did not arrive are no success: a full disk shows only when the last buffer is written.
  if (code == 2 || std::cout.flush()) return code;
  std::cerr << "mxflash: the results cannot be written to stdout; check the free space where it goes\n";
  return 2;
}
