//! Regions on a medium; makes stores durable; block allocator and append ring.
