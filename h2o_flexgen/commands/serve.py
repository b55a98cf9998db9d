"""The command `serve`: batches of OpenAI clients over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from h2o_flexgen.commands import options
from h2o_flexgen.commands.generate import (
    add_engine_options,
    add_sampling_options,
    check_policy,
    llm_arguments,
    make_params,
    open_llm,
    resumed,
    structured,
)
from h2o_flexgen.commands.options import JOB
from h2o_flexgen.errors import UserError, reason
from h2o_flexgen.policy import GIB
from h2o_flexgen.utils.files import cache_folder, read_text

#: environment variable with the API key
KEY = "H2O_FLEXGEN_API_KEY"
#: the libraries of the extra `serve`
INSTALL = "pip install starlette uvicorn python-multipart"


def make_parser(prog: str) -> options.Parser:
    what = "Run batches of OpenAI clients over HTTP, one after the other; a server that was stopped goes on."
    parser = options.Parser(prog, what)
    options.add_model_options(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1); others need an API key")
    add("--port", type=port, default=8000, help="port to listen at (default: 8000); 0: any that is free")
    add("--api-key-file", metavar="FILE", help=f"the key that clients must send (default: that in {KEY}, or none)")
    add("--folder", help="where files and batches are kept (default: in the user's cache folder)")
    add("--max-upload", type=options.gibibytes, metavar="GIB", default=GIB, help="the largest upload (default: 1 GiB)")
    add_sampling_options(parser)
    add_engine_options(parser)
    add("--verbose", action="store_true", help="print the policy and the memory plan of each batch")
    restart = "start an unfinished batch over if it began with other settings; otherwise that is an error"
    parser.group(JOB)("--restart", action="store_true", help=restart)
    return parser


def port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, not {text}")
    return value


def run(args: argparse.Namespace) -> None:
    check_policy(args)
    options.check_files(args, reads=("api_key_file", "json_schema", "policy", "hardware", "quality"), writes=())
    try:
        from h2o_flexgen.server.app import Api, make_app
        from h2o_flexgen.server.http import bind, serving, url_of
    except ImportError as e:
        raise UserError(f"the web server cannot be loaded ({reason(e)}): {INSTALL}") from None
    from h2o_flexgen.server.store import Store
    from h2o_flexgen.server.worker import Worker

    key = api_key(args)
    args.structured = structured(args)
    folder = Path(os.path.abspath(args.folder)) if args.folder is not None else cache_folder("server")
    with Store(folder) as store, bind(args.host, args.port) as listener:
        arguments = llm_arguments(args) | begun(store, args)
        with open_llm(args, arguments) as llm:
            worker = Worker(store, llm, make_params(args), args.restart)
            with serving(make_app(Api(store, worker, args.max_upload), key), listener):
                print(f"serving {llm.model.name} at {url_of(listener)}, data in {folder}", file=sys.stderr, flush=True)
                try:
                    worker.run()
                except KeyboardInterrupt:
                    print("stopped: the same command goes on with unfinished batches", file=sys.stderr)


def api_key(args: argparse.Namespace) -> str | None:
    """The key that clients must send. Raises UserError if it is empty, or others could use the server without one."""
    from h2o_flexgen.server.access import is_loopback

    key = os.environ.get(KEY)
    if args.api_key_file is not None:
        key = read_text(f"--api-key-file {args.api_key_file}", args.api_key_file)
    if key is not None and not key.strip():
        raise UserError("the API key is empty")
    if key is None and not is_loopback(args.host):
        raise UserError(f"--host {args.host} lets others use the server: give a key too, by --api-key-file or {KEY}")
    return key and key.strip()


def begun(store, args: argparse.Namespace) -> dict:
    """The arguments of `LLM` with which a batch began that an earlier server has not finished."""
    from h2o_flexgen.jobs.job import Job

    batch = store.unfinished()
    if batch is None or args.restart or not store.job_path(batch.id).exists():
        return {}
    try:
        with Job(str(store.job_path(batch.id))) as job:
            return resumed(job, args)
    except UserError:  # its rows are damaged: the batch will fail
        return {}
