//! The operations for each kind of message, as methods of [`crate::gateway::Gateway`]: each decodes the kernel's
//! fields, calls one operation of the engine, and encodes the answer.

mod attributes;
mod directory;
mod files;
mod locks;
mod names;
mod passed;
mod xattrs;

pub(crate) use attributes::attr;
