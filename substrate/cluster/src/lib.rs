//! Who is alive, in which epoch, who replicates which subtree.
