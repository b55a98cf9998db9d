.PHONY: help demo test lint docs-check bench

help:  ## what can be made (the default)
	@sed -n 's/^\([a-z-]*\):  ## /\1  /p' Makefile

demo:  ## set up, then show what the demo model writes
	bash scripts/demo.sh

test:  ## set up, then all tests
	bash scripts/test.sh

lint:  ## rules and format
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

docs-check:  ## do the documents say what the results say?
	.venv/bin/python -m bench.tables --check

bench:  ## the headline row of the comparison with other systems, under ten minutes (root, for the memory cgroup)
	bash scripts/bench.sh
