//! libhearth.so: routes a process's file calls to a mount.
