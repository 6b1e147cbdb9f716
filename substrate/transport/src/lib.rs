//! Between nodes: messages and one-sided operations, over libfabric or in process.
