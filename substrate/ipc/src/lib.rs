//! Between LibFS and SharedFS: handshake, descriptors, rings, shared words; all waiting.
