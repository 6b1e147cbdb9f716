//! A lower bound for the costs of a mount: a file system in memory with the gateway's start-up flags, validity times,
//! threads and message sizes, and nothing else. Its costs are those of FUSE. `memory_mount MOUNTPOINT [--threads N]
//! [--look MICROSECONDS]`; needs root; ends when it is unmounted.
//!
//! It grants every lock and checks no rights (the kernel does). It is only for measurements for comparison, with one
//! program at a time.

#![allow(dead_code, reason = "the messages are the gateway's, and some are not served")]

#[path = "../../src/abi.rs"]
mod abi;
#[path = "../../src/device.rs"]
mod device;
#[path = "../../src/error.rs"]
mod error;
#[path = "../../src/handshake.rs"]
mod handshake;
#[path = "../../src/options.rs"]
mod options;
mod tree;

use ipc::{Host, SystemHost, Time};
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tree::Tree;

type Failure = Box<dyn std::error::Error>;

fn number(arguments: &[String], flag: &str) -> Option<u64> {
    let at = arguments.iter().position(|argument| argument == flag)?;
    arguments.get(at + 1)?.parse().ok()
}

/// Polls for a message until a time.
fn look(device: &File, until: Time) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    while SystemHost.now() < until {
        if poll(&mut [PollFd::new(device, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0) {
            return;
        }
    }
}

fn serve(mut device: &File, tree: &Mutex<Tree>, message_bytes: usize, looks: Duration) {
    let mut message = vec![0; message_bytes];
    let mut answer = Vec::with_capacity(message_bytes);
    loop {
        if !looks.is_zero() {
            look(device, SystemHost.now().after(looks));
        }
        let bytes = match device.read(&mut message) {
            Ok(bytes) => bytes,
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ECONNABORTED)) => return,
            Err(_) => continue,
        };
        answer.clear();
        let is_due = tree.lock().is_ok_and(|mut tree| tree.answer(&message[..bytes], &mut answer));
        if is_due {
            // The calling thread may have ended.
            let _ = device.write(&answer);
        }
    }
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let usage = "usage: memory_mount MOUNTPOINT [--threads N] [--look MICROSECONDS]";
    let mountpoint = PathBuf::from(arguments.first().ok_or(usage)?);
    let mut options = options::Options { name: "floor".to_string(), ..options::Options::default() };
    options.threads = number(&arguments, "--threads").map_or(options.threads, |threads| threads as usize);
    let looks = Duration::from_micros(number(&arguments, "--look").unwrap_or(0));
    let mounted = device::Device::mount(&mountpoint, libc::S_IFDIR | 0o755, &options)?;
    let message_bytes = options.message_bytes_max as usize + 4096;
    let mut first = vec![0; message_bytes];
    let bytes = (&mounted.file).read(&mut first)?;
    let (answer, agreed) = handshake::agree(&first[..bytes], options.message_bytes_max, true)?;
    (&mounted.file).write_all(&answer)?;
    agreed?;
    println!("mounted at {}", mountpoint.display());
    let (device, tree) = (Arc::new(mounted), Arc::new(Mutex::new(Tree::new())));
    let threads = (0..options.threads).map(|_| {
        let (device, tree) = (device.clone(), tree.clone());
        let body = Box::new(move || serve(&device.file, &tree, message_bytes, looks));
        SystemHost.spawn("serves", body)
    });
    for thread in threads.collect::<Result<Vec<_>, _>>()? {
        thread.join()?;
    }
    Ok(())
}
