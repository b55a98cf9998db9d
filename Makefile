.PHONY: demo test lint bench

demo:  ## set up, then then complete text with the demo model
	bash scripts/demo.sh

test:  ## set up, then all tests
	bash scripts/test.sh

lint:
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

bench:  ## one row of the comparison with other systems, some minutes (root, for the memory cgroup)
	bash scripts/bench.sh --row "1.3b 32+32" --quick --system Accelerate --system "ours, H2O"
