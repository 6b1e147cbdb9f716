//! Mounts the model engine: `model_mount MOUNTPOINT [--no-kernel-checks]`. For the outside suites; ends by SIGTERM,
//! or when it is unmounted.

use gateway::{Options, serve};
use ipc::{Host, SystemHost};
use std::path::PathBuf;
use std::sync::Arc;
use vfs::Model;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mountpoint =
        PathBuf::from(arguments.first().ok_or("usage: model_mount MOUNTPOINT [--no-kernel-checks]")?);
    let kernel_checks = !arguments.iter().any(|argument| argument == "--no-kernel-checks");
    let options = Options { kernel_checks, ..Options::default() };
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    let model = Model::new(Arc::new(|| SystemHost.wall()), vfs::model::Limits::default());
    let mounted = Arc::new(serve(Arc::new(model), host.clone(), &mountpoint, &options)?);
    println!("mounted at {}, shared mappings: {}", mountpoint.display(), mounted.maps_shared());
    let mut signals = signal_hook::iterator::Signals::new([libc::SIGTERM, libc::SIGINT])?;
    let ended_by_signal = mounted.clone();
    host.spawn(
        "signals",
        Box::new(move || {
            if signals.forever().next().is_some()
                && let Err(error) = ended_by_signal.unmount()
            {
                eprintln!("{error}");
            }
        }),
    )?;
    Ok(mounted.wait()?)
}
