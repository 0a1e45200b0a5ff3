# GPU nodes: docker build -t smc-sglang . && docker run --gpus all -p 30000:30000 smc-sglang \
#     --model-path /models/target --draft-model-path /models/draft
# Without arguments it serves the embedded demo pair, on a GPU or without one.
# The devel image: FlashInfer compiles its kernels for the GPU at hand on first use, and needs nvcc for it.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential libnuma1 make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY requirements.lock pyproject.toml Makefile README.md ./
COPY smc_sglang smc_sglang
COPY radix_patch radix_patch
COPY server server
RUN make .venv/.ready
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD \
    [".venv/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT [".venv/bin/smc-sglang", "serve", "--host", "0.0.0.0"]
