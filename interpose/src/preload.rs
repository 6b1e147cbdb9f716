//! What happens when the library is loaded into a program: if `hearth run` says where (`HEARTH_SOCKET`) and as what
//! (`HEARTH_AT`), the program's calls are routed; it also says where the tree is mounted, if it is (`HEARTH_MOUNT`). Nothing is attached before the first call that concerns the tree.

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
    let mounted = var_os("HEARTH_MOUNT").map(PathBuf::from);
    let tree = Box::leak(Box::new(Tree::new(socket.into(), mounted.as_deref())));
    if let Err(refused) = start::serve(tree, &at.into_vec()) {
        // The one line that a program's user sees: without it, the program would quietly use another folder.
        eprintln!("hearth: this program does not see the tree: {refused}");
    }
}
