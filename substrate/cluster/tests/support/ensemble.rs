//! ZooKeeper servers as separate processes: on the loopback, or one in each of several network namespaces.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const JAR: &str = "/usr/share/java/zookeeper.jar";

/// True if ZooKeeper and Java are installed; otherwise prints that the test was skipped.
pub fn is_there() -> bool {
    let there = Path::new(JAR).exists() && Command::new("java").arg("-version").output().is_ok();
    if !there {
        println!("zookeeper: skipped: needs zookeeper");
    }
    there
}

/// An ensemble of servers, each with a folder and a process of its own.
pub struct Ensemble {
    folder: tempfile::TempDir,
    /// Address of each server, and its ports: for clients, for its followers, for elections.
    servers: Vec<(String, [u16; 3])>,
    pub children: Vec<Option<Child>>,
}

impl Ensemble {
    /// On the loopback.
    pub fn new(servers: usize) -> Self {
        // Ports that are free now; all are held until each is known.
        let held: Vec<[TcpListener; 3]> = (0..servers)
            .map(|_| std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").unwrap()))
            .collect();
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let addresses =
            held.iter().map(|three| ("127.0.0.1".to_owned(), three.each_ref().map(port))).collect();
        drop(held);
        let mut ensemble = Self::of(addresses);
        (0..servers).for_each(|server| ensemble.start(server));
        ensemble
    }

    /// One at each of these addresses; none of them is started yet.
    pub fn at(addresses: impl Iterator<Item = String>) -> Self {
        Self::of(addresses.map(|address| (address, [2181, 2888, 3888])).collect())
    }

    fn of(servers: Vec<(String, [u16; 3])>) -> Self {
        let children = servers.iter().map(|_| None).collect();
        Self { folder: tempfile::tempdir().unwrap(), servers, children }
    }

    /// The address of one server for clients.
    pub fn address(&self, server: usize) -> String {
        let (ip, ports) = &self.servers[server];
        format!("{ip}:{}", ports[0])
    }

    pub fn addresses(&self) -> String {
        let addresses: Vec<String> = (0..self.servers.len()).map(|server| self.address(server)).collect();
        addresses.join(",")
    }

    /// True if this server is the leader, by its own answer. The caller has to be able to reach it.
    pub fn leads(&self, server: usize) -> bool {
        let ask = || {
            let mut stream = TcpStream::connect(self.address(server))?;
            stream.write_all(b"srvr")?;
            let mut said = String::new();
            stream.read_to_string(&mut said)?;
            std::io::Result::Ok(said)
        };
        ask().is_ok_and(|said| said.contains("Mode: leader"))
    }

    pub fn start(&mut self, server: usize) {
        let folder = self.folder.path().join(server.to_string());
        std::fs::create_dir_all(folder.join("data")).unwrap();
        std::fs::write(folder.join("data/myid"), (server + 1).to_string()).unwrap();
        let (ip, ports) = &self.servers[server];
        let mut settings = format!(
            "tickTime=100\ninitLimit=50\nsyncLimit=20\ndataDir={}\nclientPort={}\nclientPortAddress={ip}\n\
             admin.enableServer=false\nmaxClientCnxns=0\n",
            folder.join("data").display(),
            ports[0]
        );
        if self.servers.len() > 1 {
            for (index, (ip, ports)) in self.servers.iter().enumerate() {
                settings += &format!("server.{}={ip}:{}:{}\n", index + 1, ports[1], ports[2]);
            }
        }
        std::fs::write(folder.join("zoo.cfg"), settings).unwrap();
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let child = Command::new("java")
            .args(["-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", JAR])
            .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
            .arg(folder.join("zoo.cfg"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn();
        self.children[server] = Some(child.unwrap());
    }

    pub fn kill(&mut self, server: usize) {
        if let Some(mut child) = self.children[server].take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl Drop for Ensemble {
    fn drop(&mut self) {
        (0..self.children.len()).for_each(|server| self.kill(server));
    }
}
