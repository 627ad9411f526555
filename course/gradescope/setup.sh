#!/usr/bin/env bash
# Gradescope runs this once, as root, to build the image of an assignment. No other user may look into /autograder.
set -euo pipefail
apt-get update
apt-get install -y --no-install-recommends python3-pip python3-venv
python3 -m venv /opt/uv
/opt/uv/bin/pip install uv
export UV_PYTHON_INSTALL_DIR=/opt/python  # students' code runs as another user, who cannot read /root
/opt/uv/bin/uv venv --python 3.12 /opt/maelm
export VIRTUAL_ENV=/opt/maelm
/opt/uv/bin/uv pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
/opt/uv/bin/uv pip install -r /autograder/source/maelm/requirements.txt pytest==9.2.0
useradd --system --shell /usr/sbin/nologin maelm-student
