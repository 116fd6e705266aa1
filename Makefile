# Two commands to start with: `make demo` and `make test`. Each installs what it needs, outside of this tree, in
# ${MOONPOOL_CACHE:-~/.cache/moonpool}, and says what it does.
PYTHON ?= python3
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test build lint native stub kernels wheel constraints image manifests site matrix clean

help:
	@echo 'make demo     real vLLM engines for prefill and decode, a pool, the proxy; shows who computed what'
	@echo '              NODES=2 on two nodes with a master, as if on two hosts'
	@echo '              ONCE=1 ends by itself   MODEL=path your own model   JSON=file the table as JSON'
	@echo 'make test     lint, native tests under sanitizers, pytest'
	@echo "              ARGS='-k store' for pytest   ENGINE=0 without real engines   SGLANG=0 without SGLang"
	@echo '              ONLY=pytest   HEAVY=1 the long forms, too'
	@echo 'make build    compile what changed in core/csrc, into an environment of this checkout'
	@echo 'make lint     ruff, mypy --strict, clang-format, clang-tidy   FIX=1 repairs'
	@echo 'make native   the C++ tests alone, under ASan+UBSan and under TSan'
	@echo 'make stub     write src/moonpool/_native.pyi anew'
	@echo 'make kernels  write the PTX of the GPU kernels anew, with a compiler that needs no GPU'
	@echo "make wheel    sdist, and wheels for x86-64 and aarch64 into dist/   PYTHONS='python3.12 ...' for which"
	@echo 'make constraints   the versions of constraints.txt anew, the newest that pip finds'
	@echo 'make image    the container image by docker or podman   MACHINES="x86_64 aarch64" for both'
	@echo 'make manifests     deploy/kubernetes anew from deploy/chart'
	@echo 'make site     the documentation as a site in build/site/html'
	@echo "make matrix   other engines and Pythons, the release before (VERSIONS='vllm-0.31.0 release'); long, not in CI"
	@echo 'make clean    remove what was built inside the tree (the environments in the cache stay)'

demo:
	@$(PYTHON) -m scripts.demo $(if $(ONCE),--once) $(if $(NODES),--nodes '$(NODES)') $(if $(MODEL),--model '$(MODEL)') $(if $(JSON),--json '$(JSON)')

test:
	@$(PYTHON) -m scripts.test $(if $(filter 0,$(ENGINE)),--no-engine) $(if $(filter 0,$(SGLANG)),--no-sglang) $(if $(filter 0,$(LMCACHE)),--no-lmcache) $(if $(filter 1,$(HEAVY)),--heavy) $(if $(filter pytest,$(ONLY)),--only-pytest) --pytest="$(ARGS)"

build:
	@$(PYTHON) -m scripts.build

lint:
	@$(PYTHON) -m scripts.lint $(if $(FIX),--fix)

native:
	@$(MAKE) -C tests/native

stub:
	@$(PYTHON) -m scripts.stub

kernels:
	@$(PYTHON) -m scripts.kernels

wheel:
	@$(PYTHON) -m scripts.wheels $(foreach one,$(PYTHONS),--python $(one))

constraints:
	@$(PYTHON) -m scripts.constraints

image:
	@$(PYTHON) -m scripts.image $(MACHINES)

manifests:
	@$(PYTHON) -m scripts.manifests

site:
	@$(PYTHON) -m scripts.site

matrix:
	@$(PYTHON) -m scripts.matrix $(VERSIONS)

clean:
	rm -rf build dist src/*.egg-info src/moonpool/*.so .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
