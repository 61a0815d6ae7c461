# nibble. `make` builds ./train; `make help` lists the rest.
#
# The CUDA toolkit is the one whose nvcc is on PATH, else /usr/local/cuda; CUDA_HOME=... chooses another. The code is
# built for the GPU of this machine; without one for sm_90a, plus PTX that a driver compiles for sm_80 and later.
# CUDA_ARCH="80 90a" (any list) overrides.
#
# Without nvcc (or with `make NVCC=`) the C++ compiler alone builds the same program for the CPU: what is in #ifdef
# __CUDACC__ is left out and kernels/no_cuda.h stands in for CUDA's headers. Its objects have a folder of their own.

NVCC := $(or $(if $(CUDA_HOME),$(wildcard $(CUDA_HOME)/bin/nvcc)),$(if $(filter command,$(origin CUDA_HOME)),,$(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))))
BUILD := $(if $(NVCC),build,build/cpu)
ifneq ($(filter-out clean help venv format format-check loc,$(or $(MAKECMDGOALS),all)),)
ifeq ($(NVCC),)
ifeq ($(origin CUDA_HOME) $(origin NVCC),command line file)
$(error CUDA_HOME is $(CUDA_HOME) and there is no $(CUDA_HOME)/bin/nvcc; name the folder of a CUDA toolkit or leave CUDA_HOME out)
endif
ifneq ($(filter bench benches sanitize build/dev/%,$(MAKECMDGOALS)),)
$(error $(MAKECMDGOALS) needs a GPU and nvcc was not found: install the CUDA toolkit 12.4 or later (package cuda-toolkit), or type make CUDA_HOME=/path/to/cuda $(MAKECMDGOALS))
endif
$(if $(filter build/cpu,$(BUILD)),$(info CPU build, without nvcc; for GPUs install the CUDA toolkit 12.4 or later (package cuda-toolkit), or type make CUDA_HOME=/path/to/cuda))
endif
endif
# An absolute path, also where a relative one was typed: the program finds the toolkit's libraries by it.
override CUDA_HOME := $(if $(NVCC),$(if $(filter command,$(origin CUDA_HOME)),$(abspath $(CUDA_HOME)),$(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))))
# An apt or .run toolkit has lib64; a pip or conda one has lib.
CUDA_LIB := $(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib))
CUDA_RELEASE := $(if $(NVCC),$(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p'))

find_header = $(firstword $(wildcard $(CUDA_HOME)/include/$(1) /usr/include/$(1) /usr/include/x86_64-linux-gnu/$(1)))
# The file that is linked: toolkits from PyPI have libcublasLt.so.13 alone, without a name that ends in .so.
find_library = $(firstword $(foreach d,$(CUDA_LIB) /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib,$(wildcard $(d)/$(1).so $(d)/$(1).so.[0-9] $(d)/$(1).so.[0-9][0-9])))
CUBLASLT := $(if $(call find_header,cublasLt.h),$(call find_library,libcublasLt))
NVRTC := $(call find_library,libnvrtc)
NCCL := $(call find_header,nccl.h)

ifeq ($(origin CUDA_ARCH),undefined)
GPU_ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ')
CUDA_ARCH := $(if $(GPU_ARCH),$(patsubst 90,90a,$(GPU_ARCH)),90a)
CUDA_PTX := $(if $(GPU_ARCH),,80)
endif
GENCODE = $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) \
           $(foreach a,$(CUDA_PTX),-gencode arch=compute_$(a),code=compute_$(a))

WARNINGS := -Wall -Wextra
CFLAGS := -std=gnu11 -D_GNU_SOURCE -O3 -march=native -ffp-contract=off -fno-math-errno -fopenmp -pthread $(WARNINGS) $(SANITIZERS) -MMD -MP
# -ffp-contract=off and explicit fmaf: the plain C versions give the same bits whatever the compiler would like to fuse.
# -fno-math-errno: a square root is one instruction, not a call that may set errno.
# -fno-trapping-math: no code reads which exceptions arose, so vectors may compute both sides of a choice.
# HOST_O is for the host's code alone: nvcc hands its -O to the C++ compiler behind all of -Xcompiler.
HOST_O = -O3
NVCCFLAGS = -std=c++17 $(HOST_O) --expt-relaxed-constexpr -lineinfo --threads 2 $(GENCODE) -MMD -MP \
             -Xcompiler -march=native,-ffp-contract=off,-fno-math-errno,-fno-trapping-math,-fopenmp,-pthread,-Wall,-Wextra
CXXFLAGS = -std=c++17 $(HOST_O) -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -pthread $(WARNINGS) \
            -Wno-unused-parameter -Wno-unused-function -Wno-uninitialized -Wno-pass-failed -include initializer_list -MMD -MP
ifneq ($(NVCC),)
COMPILE = $(NVCC) $(NVCCFLAGS)
LINK := $(NVCC) $(GENCODE)
LDFLAGS := -L$(CUDA_LIB) -Xlinker -rpath,$(CUDA_LIB) -l:$(notdir $(CUBLASLT)) -lgomp -lpthread -ldl -lrt
else
COMPILE = $(CXX) -x c++ $(CXXFLAGS) $(SANITIZERS)
LINK := $(CXX) -fopenmp $(SANITIZERS)
LDFLAGS := -lpthread -ldl -lrt
endif

DATA_OBJECTS := $(patsubst data/%.c,$(BUILD)/data/%.o,$(wildcard data/*.c))
RANKS_OBJECTS := $(patsubst kernels/ranks/%.c,$(BUILD)/kernels/ranks/%.o,$(wildcard kernels/ranks/*.c))
# The one that takes longest comes first, so that nothing waits for it at the end.
LONG := optim/table.cu
OPTIM_OBJECTS := $(patsubst optim/%.cu,$(BUILD)/optim/%.o,$(LONG) $(filter-out $(LONG) optim/nibble_%.cu optim/loaded_cublaslt.cu,$(wildcard optim/*.cu optim/*/*.cu))) \
                 $(patsubst optim/%.c,$(BUILD)/optim/%.o,$(wildcard optim/*.c))
UNIT_OBJECTS := $(patsubst dev/unit/%.cu,$(BUILD)/unit/%.o,$(wildcard dev/unit/*.cu))
SHARED_OBJECTS := $(OPTIM_OBJECTS) $(DATA_OBJECTS) $(RANKS_OBJECTS) $(BUILD)/corpus.o
SOURCES := $(sort $(wildcard *.cu kernels/*.cuh kernels/*.h kernels/ranks/*.c kernels/ranks/*.cuh kernels/ranks/*.h \
                             optim/*.cu optim/*.cuh optim/*.h optim/*.c optim/*/*.cu optim/*/*.cuh optim/*/*.h data/*.c data/*.h dev/*.cu dev/*.h \
                             dev/examples/*.cuh dev/unit/*.cu dev/unit/*.c dev/unit/*.h dev/fuzz/*.cu))
# Its last twentieth is the validation text: train_gpt2.cu and what comes before it.
# Without the table of numbers in data/unicode.h.
CORPUS := $(sort $(wildcard README.md Makefile data/*.py dev/*.py dev/*/*.py)) $(filter-out train_gpt2.cu data/unicode.h,$(SOURCES)) train_gpt2.cu

all: train

# ./train and ./test_gpt2 are links to the programs of the build that was asked for last.
train test_gpt2: %: $(BUILD)/% FORCE
	@[ $< -ef $@ ] || ln -f $< $@

$(BUILD)/train: $(BUILD)/train_gpt2.o $(SHARED_OBJECTS)
	$(LINK) -o $@ $^ $(LDFLAGS)

$(BUILD)/test_gpt2: $(BUILD)/test_gpt2.o $(UNIT_OBJECTS) $(SHARED_OBJECTS)
	$(LINK) -o $@ $^ $(LDFLAGS)

$(BUILD)/dev/%: $(BUILD)/dev/%.o $(SHARED_OBJECTS)
	$(LINK) -o $@ $^ $(LDFLAGS)

$(BUILD)/%.o: %.cu $(BUILD)/found
	@mkdir -p $(@D)
	$(COMPILE) -c -o $@ $<

$(BUILD)/unit/%.o: dev/unit/%.cu $(BUILD)/found
	@mkdir -p $(@D)
	$(COMPILE) -c -o $@ $<

# The optimizer's bits are the same on the host and on every device: nothing is contracted behind our back.
$(BUILD)/optim/%.o: NVCCFLAGS += -fmad=false

# Many small functions, which -O3 makes no faster and takes three times as long for.
$(BUILD)/optim/table.o $(BUILD)/lib/optim/table.o: HOST_O := -O2

# These have no kernels, so one target is enough: the one that runs on every GPU.
HOST_ONLY := $(patsubst %,$(BUILD)/optim/%.o,checkpoint/convert jit list model/decode model/offload optim override plan resolve)
$(HOST_ONLY): private CUDA_ARCH :=
$(HOST_ONLY): private CUDA_PTX := 80

# Benchmarks and tests run on the machine that builds them.
$(BUILD)/dev/%.o $(BUILD)/unit/%.o $(BUILD)/test_gpt2.o: private CUDA_PTX :=
$(BUILD)/unit/%.o: HOST_O := -O2

$(BUILD)/data/%.o: data/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<

# --version and log.jsonl name the commit; a file holds it, so that another one compiles version.c again.
COMMIT = $(shell [ ! -e .git ] || git describe --always --abbrev=10 --dirty --exclude '*' 2>/dev/null)
$(BUILD)/commit: FORCE
	@mkdir -p $(@D)
	@echo "$(or $(COMMIT),unknown)" | cmp -s - $@ || echo "$(or $(COMMIT),unknown)" > $@

$(BUILD)/data/version.o: $(BUILD)/commit $(BUILD)/found
$(BUILD)/data/version.o: CFLAGS += -DCOMMIT='"$(shell cat $(BUILD)/commit)"' \
    -DBUILT='"$(if $(NVCC),CUDA $(CUDA_RELEASE) for $(strip $(foreach a,$(CUDA_ARCH),sm_$(a))),CPU alone)"'

$(BUILD)/kernels/ranks/%.o: kernels/ranks/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<

$(BUILD)/optim/%.o: optim/%.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<

# The optimizer as a library, for other programs: objects of their own, which any machine of the kind runs and which
# export nothing but nibble_optim.h. It opens cuBLASLt only for rules that read matrices.
LIB := $(BUILD)/lib
LIB_OBJECTS := $(patsubst $(BUILD)/%,$(LIB)/%,$(BUILD)/optim/nibble_optim.o $(BUILD)/optim/nibble_settings.o $(BUILD)/optim/loaded_cublaslt.o $(filter-out %/saved.o $(BUILD)/optim/model/%,$(OPTIM_OBJECTS))) \
               $(patsubst %,$(LIB)/data/%.o,errors files memory option text)
comma := ,
LIB_HOST := -fPIC -fvisibility=hidden $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3)
space := $(subst ,, )
LIB_COMPILE = $(subst -march=native,$(if $(NVCC),$(subst $(space),$(comma),$(strip $(LIB_HOST))),$(LIB_HOST)),$(COMPILE))

lib: $(LIB)/libnibble_optim.so

$(LIB)/libnibble_optim.so: $(LIB_OBJECTS)
	$(LINK) -shared -o $@ $^ $(if $(NVCC),-cudart static -lgomp -Xlinker -rpath='$$ORIGIN' \
	    -Xlinker -z -Xlinker defs -Xlinker --wrap=free,-Wl$(comma)-rpath='$$ORIGIN' -Wl$(comma)-z$(comma)defs -Wl$(comma)--wrap=free) -lpthread -ldl -lrt

$(LIB)/optim/%.o: NVCCFLAGS += -fmad=false
$(LIB)/optim/%.o: optim/%.cu $(BUILD)/found
	@mkdir -p $(@D)
	$(LIB_COMPILE) -c -o $@ $<

$(LIB)/data/%.o: data/%.c
	@mkdir -p $(@D)
	$(CC) $(subst -march=native,$(LIB_HOST),$(CFLAGS)) -c -o $@ $<

# The Python package with the library inside, in dist/.
wheel: lib
	python3 optim/python/wheel.py $(LIB)/libnibble_optim.so

# The default corpus: this program's own source text, linked in between two symbols.
$(BUILD)/corpus.txt: $(CORPUS)
	@mkdir -p $(@D)
	cat $^ > $@

$(BUILD)/corpus.o: $(BUILD)/corpus.txt
	printf '.section .rodata\n.global corpus_begin, corpus_end\ncorpus_begin: .incbin "$<"\ncorpus_end: .byte 0\n.section .note.GNU-stack,"",@progbits\n' | $(CC) -x assembler -c -o $@ -

# What the build uses, printed once, and what is missing, with the package that has it. Objects depend on it, so that
# another toolkit or architecture builds them again.
$(BUILD)/found: FORCE
	@mkdir -p $(@D)
ifeq ($(NVCC),)
	@echo "$(CXX) $(SANITIZERS)" | cmp -s - $@ || echo "$(CXX) $(SANITIZERS)" > $@
else
	@{ echo "nvcc      $(CUDA_RELEASE)  $(NVCC)"; \
	   echo "cuBLASLt  $(or $(CUBLASLT),missing: install libcublas-dev-$(subst .,-,$(CUDA_RELEASE)))"; \
	   echo "NVRTC     $(or $(NVRTC),missing: install cuda-nvrtc-dev-$(subst .,-,$(CUDA_RELEASE)))"; \
	   echo "NCCL      $(or $(NCCL),not found: this build runs on one GPU (install libnccl-dev for several))"; \
	   echo "target    $(foreach a,$(CUDA_ARCH),sm_$(a)) $(foreach a,$(CUDA_PTX),and PTX of compute_$(a))$(if $(GPU_ARCH), (the GPU of this machine))"; } > $@.new
	@cmp -s $@.new $@ && rm $@.new || { cat $@.new; mv $@.new $@; }
	@! grep missing $@ 1>&2
endif

# PREFIX/bin/nibble.
PREFIX ?= /usr/local
install: train
	install -d "$(DESTDIR)$(PREFIX)/bin"
	install -m 755 $(BUILD)/train "$(DESTDIR)$(PREFIX)/bin/nibble"

test: train test_gpt2
	./test_gpt2 $(TEST)

bench: $(BUILD)/dev/bench
	./$(BUILD)/dev/bench $(BENCH)

# Every benchmark in dev/, so that none stays behind when a kernel changes.
benches: $(patsubst dev/%.cu,$(BUILD)/dev/%,$(wildcard dev/*.cu))

# dev/hash.py says what HASH may hold.
hash: train $(if $(filter --short --against gpu,$(HASH)),,lib)
	python3 dev/hash.py $(BUILD)/train $(HASH)

# Memory errors in every GPU test; races in the shared memory of the kernels whose warps and copies go at their own pace,
# in tests so small that the slow checker can take them and on so few multiprocessors that all memory is used again.
sanitize: test_gpt2
	NIBBLE_SANITIZE=1 compute-sanitizer --tool memcheck --error-exitcode 1 ./test_gpt2 --here -k _gpu $(SANITIZE)
	compute-sanitizer --tool racecheck --error-exitcode 1 ./test_gpt2 --here -k _race_gpu

# The parsers of what others write, each for FUZZ_SECONDS with inputs that clang's libFuzzer makes up; dev/fuzz says more.
FUZZ_SECONDS ?= 6
FUZZERS := address,undefined,float-cast-overflow
SANITIZED := --no-print-directory NVCC= BUILD=build/fuzz CC=clang CXX=clang++ \
    SANITIZERS="-O1 -g1 -fsanitize=fuzzer-no-link,$(FUZZERS) -fno-sanitize-recover=all"
fuzz: train
	@if ! echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' | \
	     clang++ -fopenmp -fsanitize=fuzzer,$(FUZZERS) -x c++ - -o build/fuzz.probe 2> /dev/null; then \
	    echo "skip  fuzz: needs clang with its sanitizers and OpenMP; apt-get install clang libomp-dev, then type make fuzz again"; \
	    echo "0 passed, 0 failed, 1 skipped"; \
	else \
	    rm -f build/fuzz.probe; \
	    $(MAKE) $(SANITIZED) build/fuzz/fuzz && \
	    python3 dev/fuzz/run.py $(FUZZ_SECONDS) $(FUZZ); \
	fi

build/fuzz/fuzz: $(BUILD)/dev/fuzz/fuzz.o $(SHARED_OBJECTS)
	$(LINK) -fsanitize=fuzzer -Wl,--wrap=launch_failed -o $@ $^ $(LDFLAGS)

# Tests of the CPU with the fuzzers' objects, for memory errors and undefined behaviour. Leaks are not looked for, as
# text_kept keeps texts until the program ends. Tests that start many programs would take too long.
SANITIZE_CPU ?= $(addprefix -k ,data_ corpus_content corpus_fing corpus_data \
    corpus_banner folders_ evaluation_ option_ convert_ cli_bad cli_sample cli_nonfinite rules_ rows_ override_ placed_ learning)
sanitize-cpu:
	$(MAKE) $(SANITIZED) build/fuzz/train build/fuzz/test_gpt2
	mkdir -p build/fuzz/dev && ln -sfn ../../../dev/unit build/fuzz/dev/unit  # the tests' files lie beside the program
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 build/fuzz/test_gpt2 -j $$(nproc) $(SANITIZE_CPU)

# What a machine does to a run: kills, failing calls, signals.
faults: train build/dev/faults_preload.so
	python3 dev/faults.py $(FAULTS)

build/dev/faults_preload.so: dev/faults_preload.c
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -O2 $(WARNINGS) -shared -fPIC -o $@ $< -ldl

# Not .venv/bin/python, a link to the system's Python: touch would change that file, or fail where it is not the user's.
venv: .venv/installed
.venv/installed: data/requirements.txt dev/requirements.txt
	python3 -m venv .venv
	.venv/bin/pip install -q --disable-pip-version-check -r data/requirements.txt -r dev/requirements.txt
	@touch $@

format:
	clang-format -i $(SOURCES)

format-check:
	clang-format --dry-run --Werror $(SOURCES)

loc:
	@python3 dev/loc.py

# The figures of the READMEs, from the results that they come from and from ./train as it is.
tables: $(if $(wildcard train),,train)
	@python3 dev/tables.py

clean:
	rm -rf build train test_gpt2

help:
	@echo "make              build ./train"
	@echo "make install      PREFIX=/usr/local: bin/nibble (that is ./train)"
	@echo "make test         build and run the tests (TEST=\"-k substring\" picks, --list names them, -j N runs N at a time)"
	@echo "make lib          the optimizer as a C library, build/lib/libnibble_optim.so (optim/nibble_optim.h)"
	@echo "make wheel        the same as a Python package for PyTorch, in dist/ (optim/python/README.md)"
	@echo "make bench        on a GPU: tokens/s of whole steps and the share of each kernel (BENCH=\"--matmul fp8 gpt2 64 524288\")"
	@echo "make hash         whether a change keeps all bits: checksums of short trainings, each with other formats, rules and"
	@echo "                  ways to run, against dev/results/hash.txt (HASH=\"--short\", \"-k muon\", \"--device gpu\", \"--record\")"
	@echo "make benches      build all benchmarks of dev/"
	@echo "make sanitize     on a GPU: the GPU tests under compute-sanitizer"
	@echo "make sanitize-cpu  CPU tests under clang's sanitizers of addresses and undefined behaviour (SANITIZE_CPU=\"-k folders_\" picks)"
	@echo "make fuzz         parsers under clang's fuzzer and sanitizers (FUZZ_SECONDS=20 for each, FUZZ=\"json state\" picks)"
	@echo "make faults       kills, failing calls and signals against ./train:"
	@echo "                  about a minute; FAULTS=\"--kills 300 --calls 300 --signals 200\" for longer"
	@echo "make venv         Python tools for data preparation and plots, in .venv"
	@echo "make format       clang-format in place; make format-check only looks"
	@echo "make loc          lines and code lines of each part, beside the limits of dev/limits.txt"
	@echo "make tables       write the figures of the READMEs anew, after a file of results changed"
	@echo "make clean        remove what was built"
	@echo "CUDA_HOME=DIR  CUDA_ARCH=\"80 90a\"  choose toolkit and targets; NVCC= (empty) builds for the CPU alone"

FORCE:
.PHONY: all lib wheel install test bench benches hash sanitize sanitize-cpu fuzz faults venv format format-check loc tables clean help FORCE
.SECONDARY:
-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d $(BUILD)/*/*/*.d $(BUILD)/*/*/*/*.d)
