# Trireme on a CPU. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t trireme:cpu .
#   docker run --rm trireme:cpu                                   # the demo
#   docker run --rm -v "$PWD:/work" trireme:cpu run my.yaml       # a run of your own
FROM python:3.11-slim

WORKDIR /opt/trireme
COPY constraints.txt ./
# torch first, from the index of its CPU builds: the default build includes CUDA's libraries
# hadolint ignore=DL3013
RUN torch="$(grep -i '^torch==' constraints.txt)" \
    && pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "$torch"
COPY pyproject.toml README.md LICENSE ./
COPY trireme trireme
COPY trinity trinity
RUN pip install --no-cache-dir -c constraints.txt .

# not root: workflows and plug-ins are programs of the user
RUN useradd --create-home --uid 1000 trireme && install -d -o trireme /work
USER 1000
WORKDIR /work
ENTRYPOINT ["trireme"]
CMD ["run"]
