//! Fuzzes the decoders of `format::wire` between peers: frames, and messages of remote calls.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::wire(bytes));
