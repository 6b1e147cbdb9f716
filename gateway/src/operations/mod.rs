//! What each kind of message does, as methods of [`crate::gateway::Gateway`]: fields of the kernel's in, one operation of the
//! engine, fields of the kernel's out.

mod attributes;
mod directory;
mod files;
mod locks;
mod names;
mod passed;
mod xattrs;

pub(crate) use attributes::attr;
