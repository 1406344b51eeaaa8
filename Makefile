# make demo   builds, and compares MXFP8 attention with exact attention on real operands
# make test   builds and runs all tests
# Both install missing Debian packages first (as root or with sudo).

BUILD := build/release
MXFLASH := $(BUILD)/tools/mxflash
DATA := examples/data/gpt_layer1_512.safetensors

.PHONY: demo test build deps format clean

demo: deps
	@cmake --preset release > /dev/null
	@cmake --build --preset release --target mxflash_cli
	@echo; echo "== MXFP8 against exact attention: one layer of a small GPT, causal, forward and backward"
	$(MXFLASH) attend $(DATA) --causal --backward
	@echo; echo "== The same with rotate_qk and smooth_k, and a report with pictures"
	$(MXFLASH) attend $(DATA) --causal --backward --rotate-qk --smooth-k --report build/report.html
	@echo; echo "Now open build/report.html, or try your own: $(MXFLASH) attend FILE.safetensors --causal --backward"

test: build
	ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $$(nproc)

build: deps
	@cmake --preset release > /dev/null
	@cmake --build --preset release

deps:
	@.ci/deps build

format:
	git ls-files '*.h' '*.c' '*.cpp' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	rm -rf build
