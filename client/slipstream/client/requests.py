"""The commands that ask a running controller for something."""

from __future__ import annotations

import argparse
import json

from google.protobuf.json_format import MessageToJson

from slipstream.client.client import Client
from slipstream.protocol.errors import ConfigError
from slipstream.v1 import environment_pb2, fleet_pb2, status_pb2


def connect(arguments: argparse.Namespace) -> Client:
    """The client of a command's connection arguments."""
    return Client(arguments.controller, token_file=arguments.token_file, tls_ca=arguments.tls_ca)
