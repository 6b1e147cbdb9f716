//! Starts the library when it is loaded into a program. If `hearth run` has set the daemon's socket (`HEARTH_SOCKET`)
//! and the path of the tree (`HEARTH_AT`), the library routes the program's calls. `HEARTH_MOUNT` is the mount point of
//! the tree, if it is mounted. The library attaches at the first call that concerns the tree. With an empty socket it serves
//! nothing.

use crate::start;
use crate::tree::Tree;
use std::env::var_os;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    let (Some(socket), Some(at)) = (var_os("HEARTH_SOCKET"), var_os("HEARTH_AT")) else { return };
    if socket.is_empty() {
        return;
    }
    let mounted = var_os("HEARTH_MOUNT").map(PathBuf::from);
    let tree = Box::leak(Box::new(Tree::new(socket.into(), mounted.as_deref())));
    if let Err(refused) = start::serve(tree, &at.into_vec()) {
        // A line for the program's user: without it, the program would silently use another folder.
        eprintln!("hearth: this program does not see the tree: {refused}");
    }
}
