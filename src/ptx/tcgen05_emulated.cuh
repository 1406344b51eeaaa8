#error "emulation: to come"
