//! Network namespaces on one machine, one for each node, joined by a bridge in a namespace of its own. Needs root and
//! the program `ip`. Dropping the value removes them; a killed test leaves namespaces called `hearth-PID-N`, which
//! `ip netns delete` removes.

use std::process::Command;

pub struct Namespaces {
    prefix: String,
    nodes: u32,
}

fn ip(arguments: &[&str]) -> bool {
    let output = Command::new("ip").args(arguments).output();
    output.is_ok_and(|output| output.status.success())
}

impl Namespaces {
    /// Creates the namespaces; `None` if the process may not.
    pub fn new(nodes: u32) -> Option<Self> {
        // SAFETY: no arguments, cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return None;
        }
        let made = Self { prefix: format!("hearth-{}", std::process::id()), nodes };
        let hub = made.name(0);
        if !ip(&["netns", "add", &hub]) {
            return None;
        }
        let mut right = ip(&["-n", &hub, "link", "add", "bridge", "type", "bridge"]);
        right &= ip(&["-n", &hub, "link", "set", "bridge", "up"]);
        for node in 1..=nodes {
            let name = made.name(node);
            let port = format!("to{node}");
            right &= ip(&["netns", "add", &name]);
            let link = ["link", "add", "net0", "netns", &name, "type", "veth", "peer", "name", &port];
            right &= ip(&[&link[..], &["netns", &hub]].concat());
            right &= ip(&["-n", &hub, "link", "set", &port, "master", "bridge", "up"]);
            right &= ip(&["-n", &name, "address", "add", &format!("{}/24", made.ip(node)), "dev", "net0"]);
            right &= ip(&["-n", &name, "link", "set", "lo", "up"]);
            right &= ip(&["-n", &name, "link", "set", "net0", "up"]);
        }
        right.then_some(made)
    }

    fn name(&self, node: u32) -> String {
        format!("{}-{node}", self.prefix)
    }

    pub fn ip(&self, node: u32) -> String {
        format!("10.77.0.{node}")
    }

    /// Takes the network interface of a node down or up.
    pub fn link(&self, node: u32, up: bool) {
        let state = if up { "up" } else { "down" };
        assert!(ip(&["-n", &self.name(0), "link", "set", &format!("to{node}"), state]));
    }

    /// Runs a function on a thread in a node's namespace; sockets that it creates belong to the namespace.
    pub fn inside<R: Send>(&self, node: u32, body: impl FnOnce() -> R + Send) -> R {
        let entrance = self.entrance(node);
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                enter(&entrance);
                body()
            });
            thread.join().unwrap()
        })
    }

    /// The argument of [`enter`].
    pub fn entrance(&self, node: u32) -> String {
        format!("/run/netns/{}", self.name(node))
    }
}

/// Moves the calling thread into a node's namespace.
pub fn enter(entrance: &str) {
    let file = std::fs::File::open(entrance).unwrap();
    // SAFETY: changes this thread only.
    let entered = unsafe { libc::setns(std::os::fd::AsRawFd::as_raw_fd(&file), libc::CLONE_NEWNET) };
    assert_eq!(entered, 0, "root may enter a namespace");
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for node in 0..=self.nodes {
            ip(&["netns", "delete", &self.name(node)]);
        }
    }
}
