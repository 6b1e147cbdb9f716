//! Fuzzes the decoders of `format::wire` that strangers reach: those of a listener, and that of a connection request.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::listener(bytes));
