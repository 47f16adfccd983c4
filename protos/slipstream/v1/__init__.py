"""Protocol version 1: code generated from the .proto files in this folder by `make protos`."""
