#!/usr/bin/env bash
# Gradescope runs this once, as root, to build an assignment's image.
set -euo pipefail
cd /autograder/source/maelm
apt-get update
apt-get install -y --no-install-recommends python3-venv
python3 -m venv /opt/uv
/opt/uv/bin/pip install uv
export UV_PYTHON_INSTALL_DIR=/opt/python VIRTUAL_ENV=/opt/maelm
/opt/uv/bin/uv venv --managed-python --python 3.12 /opt/maelm
/opt/uv/bin/uv pip install "$(grep '^torch=' requirements.txt)" --index-url https://download.pytorch.org/whl/cpu
/opt/uv/bin/uv pip install -r requirements.txt "$(grep '^pytest=' requirements-test.txt)"
