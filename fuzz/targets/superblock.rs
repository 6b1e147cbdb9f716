//! Fuzzes the decoders of `format::superblock`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::superblock(bytes));
