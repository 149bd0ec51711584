"""The texts of a federation's folder."""

APP_NAME, APP_VERSION = "qupel/qupel-app", "1.0.0"  # publisher/name of the app below
INNER_PORT = 18443  # of the SuperLink on the server's loopback, behind the proxy

APP = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "qupel-app"
version = "1.0.0"
description = "QuPeL on Flower: names code that every machine has installed itself"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "qupel"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "qupel.flower.server_app:app"
clientapp = "qupel.flower.client_app:app"

[tool.flwr.app.config]
run = ""
mode = "run"
"""

CLIENT = """# Client {number}. Nothing of this file leaves the machine.
client = {number}                  # its number; the server knows its key under the name client-{number}
{size}                    # 1 to 8, 32 for full precision; or: budget = "24 KiB" for its file
{layers}{own}state = "state"             # folder for its personal model, its centers and exported files
keep_days = 30              # states of a job go when nobody has asked for it this long; its exported model stays
resident = true             # keep torch and data loaded between rounds (false: load them in every round)

# Its data. Its own: name = "mine.npz" (train_inputs, train_targets, test_inputs, test_targets, classes) and no [split].
{data}
# A try-out: this client takes its part of a data set that all clients have.
{split}
# What it does at all, whatever a server asks for; see docs/secure.md.
# [policy]
# methods = ["qupel", "fedavg"]
# networks = ["digits_cnn"]
# rounds = 200              # of a job, at most
# secure = true             # only jobs with secure aggregation
# least = 10                # clients in a sum, at least
# epsilon = 1.0             # only with a [privacy] at least so strong

# Local differential privacy of what it sends; see docs/deploy.md for what that protects.
# [privacy]
# clip = 1.0
# epsilon = 1.0
# delta = 1e-5
# max_rounds = 100          # it answers a round once and these in all, whatever a server says;
# max_epsilon = 10.0        # T rounds cost T epsilon
# max_delta = 0.01          # and T delta
"""

TRY_OUT = """allow = {allow}    # modules that a job may name its parts from; there is none by default
modules = {folder}    # a try-out: they are here, besides this folder
"""
ELSEWHERE = """# allow = {allow}    # modules beside this file that a job may name its parts from: yours to decide
"""

START = """#!/bin/sh
# Starts this side of the federation in the foreground.
HERE=$(cd "$(dirname "$0")" && pwd)
export PATH="${{QUPEL_VENV:-{venv}}}/bin:$PATH"
{exports}
exec {command}
"""

# Flower refuses a node that comes back within seconds of an unclean death: hence the delay.
UNIT = """# Copy {what} to {place} and this file to /etc/systemd/system.
[Unit]
Description=QuPeL {name}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
User=qupel
Environment=QUPEL_VENV={venv}
ExecStart={start}
Restart=always
RestartSec=60
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ReadWritePaths={place}

[Install]
WantedBy=multi-user.target
"""

NGINX = """# Clients may reach the fleet interface and nothing else: whoever reaches the control interface runs code
# on the server. The SuperLink itself listens on 127.0.0.1:{inner} only.
server {{
    listen {port} ssl;
    server_name {host};
    ssl_certificate {here}/server.crt;
    ssl_certificate_key {here}/server.key;
    ssl_protocols TLSv1.2 TLSv1.3;
    client_max_body_size 0;

    location /v1/fleet/ {{
        proxy_pass https://127.0.0.1:{inner};
        proxy_ssl_trusted_certificate {here}/ca.crt;
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_read_timeout 300s;
    }}
    location / {{ return 404; }}
}}
"""

DEFAULT_CONFIG = """
bits = [2, 3]
[split]
clients = {clients}
train_per_client = 20
[methods.QuPeL]
recipe = "qupel"
"""
