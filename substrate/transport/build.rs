//! Compiles the C part of the libfabric bindings. The build needs only the headers; the library is loaded at run
//! time.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=shim/fabric.c");
    let mut build = cc::Build::new();
    build.file("shim/fabric.c").warnings(true).extra_warnings(true).warnings_into_errors(false);
    let folders =
        std::env::var("LIBFABRIC_INCLUDE").unwrap_or_else(|_| "/usr/include:/usr/local/include".into());
    println!("cargo:rerun-if-env-changed=LIBFABRIC_INCLUDE");
    let folder = folders.split(':').find(|folder| Path::new(folder).join("rdma/fabric.h").exists());
    let Some(folder) = folder else {
        panic!(
            "the headers of libfabric are missing (rdma/fabric.h in {folders}): on Debian `apt-get install \
             libfabric-dev`; elsewhere name their folder in LIBFABRIC_INCLUDE"
        );
    };
    if folder != "/usr/include" {
        build.include(folder);
    }
    build.compile("hearth_fabric");
    println!("cargo:rustc-link-lib=dl");
}
