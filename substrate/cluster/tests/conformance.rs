//! One suite for every backend of `Manager`: the simulated one (a service in this process, on a recorded medium), and
//! the embedded one (its own process on a folder, reached by its socket, ended by SIGKILL).

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "clippy knows tests by their attribute, and helpers have none")]

#[path = "support/process.rs"]
mod process;
#[path = "conformance/suite.rs"]
mod suite;

use cluster::{Expeller, Manager, Rules, Service, Store};
use ipc::{Host, SystemHost};
use pmem::Recorder;
use process::ManagerProcess;
use std::sync::Arc;
use suite::{Backend, CASES, rules};

/// A service in this process.
struct Simulated {
    rules: Rules,
    recorder: Recorder,
    service: Option<Arc<Service>>,
    clock: Option<Box<dyn ipc::Join>>,
}

impl Simulated {
    fn new(rules: Rules) -> Self {
        let mut backend = Self { rules, recorder: Recorder::new(), service: None, clock: None };
        backend.start();
        backend
    }

    fn start(&mut self) {
        let (store, kept) = Store::open(self.recorder.medium(), 77, self.rules).unwrap();
        let service = Service::new(Arc::new(SystemHost), store, kept, Expeller::Core).unwrap();
        self.clock = Some(service.start_clock().unwrap());
        self.service = Some(service);
    }

    fn stop(&mut self) {
        self.service.take().unwrap().stop();
        self.clock.take().unwrap().join().unwrap();
    }
}

impl Backend for Simulated {
    fn client(&self) -> Arc<dyn Manager> {
        self.service.clone().unwrap()
    }

    fn restart(&mut self) {
        self.stop();
        // The lock of the folder ends with the last reference to the service.
        let image = self.recorder.image();
        self.recorder = Recorder::of_image(image);
        self.start();
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        if self.service.is_some() {
            self.stop();
        }
    }
}

/// The manager in its own process.
struct Embedded(ManagerProcess);

impl Backend for Embedded {
    fn client(&self) -> Arc<dyn Manager> {
        Arc::new(self.0.client())
    }

    fn restart(&mut self) {
        self.0.kill();
        self.0.start();
    }
}

fn run(name: &str, start: impl Fn(Rules) -> Box<dyn Backend>) {
    for (case, lease_ms, body) in CASES {
        let began = SystemHost.now();
        body(&mut *start(rules(lease_ms)));
        println!("{name}: {case}: ok, {} ms", SystemHost.now().since(began).as_millis());
    }
    println!("{name}: {} cases", CASES.len());
}

#[test]
fn simulated() {
    run("simulated", |rules| Box::new(Simulated::new(rules)));
}

#[test]
fn embedded() {
    run("embedded", |rules| Box::new(Embedded(ManagerProcess::new(rules))));
}

#[test]
fn embedded_over_transport() {
    run("embedded over transport", |rules| Box::new(Embedded(ManagerProcess::listening(rules))));
}

/// The manager's process: this test binary again, started with the environment of a manager.
#[test]
fn manager_process() {
    process::serve_if_requested();
}
