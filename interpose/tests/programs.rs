//! Unmodified programs over the library: the C cases of `probe.c`, and programs in everyday use.
//!
//! By default the mount is a mirror of a temporary folder (`examples/mirror.rs`), so processes share real files, and
//! the tests can compare the results of programs with the folder. With `HEARTH_TEST_WRAPPER` (a command in front of
//! every program, for example `hearth run --dir D --node 1 --`) and `HEARTH_TEST_AT` (a folder that programs see under
//! it) the same tests run on any other mount.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Limit of seconds for a program.
const LIMIT_SECONDS: &str = "60";

/// The tests' library, built with them by `cargo test` (but not by `cargo test --test programs`).
fn library() -> PathBuf {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    let path = FOUND.get_or_init(|| {
        let path = find_library();
        let built = path.metadata().and_then(|status| status.modified()).unwrap();
        for folder in ["src", "src/calls", "src/patch", "examples"] {
            for entry in std::fs::read_dir(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap() {
                let changed =
                    entry.and_then(|entry| entry.metadata()).and_then(|status| status.modified()).unwrap();
                assert!(
                    changed <= built,
                    "{} is older than a source file: build the examples",
                    path.display()
                );
            }
        }
        path
    });
    path.clone()
}

fn find_library() -> PathBuf {
    let me = std::env::current_exe().unwrap();
    let folder = me.parent().and_then(|deps| deps.parent()).unwrap().join("examples");
    let plain = folder.join("libmirror.so");
    if plain.exists() {
        return plain;
    }
    let entries = std::fs::read_dir(&folder).unwrap().filter_map(Result::ok);
    let ours = entries.filter(|entry| {
        let name = entry.file_name().into_string().unwrap_or_default();
        name.starts_with("libmirror") && name.ends_with(".so")
    });
    let newest = ours.max_by_key(|entry| entry.metadata().and_then(|status| status.modified()).unwrap());
    newest.expect("cargo test builds the example").path()
}

/// The C cases, compiled once.
fn probe(linked: &str) -> PathBuf {
    static DONE: OnceLock<()> = OnceLock::new();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    DONE.get_or_init(|| {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/probe.c");
        for (name, extra) in [("dynamic", "-DDYNAMIC"), ("static", "-static")] {
            let fresh = folder.join(format!("probe-{name}.{}", std::process::id()));
            let mut cc = Command::new("cc");
            cc.args(["-O1", "-Wall", "-Wno-stringop-overflow", "-Wno-nonnull", "-pthread", extra, "-o"]);
            let output = cc.arg(&fresh).arg(source).output().expect("a C compiler");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            std::fs::rename(&fresh, folder.join(format!("probe-{name}"))).unwrap();
        }
    });
    folder.join(format!("probe-{linked}"))
}

/// An empty folder on the file system under test.
struct World {
    at: String,
    behind: Option<tempfile::TempDir>,
    /// Contains the path at which the folder appears, which does not exist there.
    _above: Option<tempfile::TempDir>,
}

impl World {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let own = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        if let Ok(at) = std::env::var("HEARTH_TEST_AT") {
            let world = Self { at: format!("{at}/{own}"), behind: None, _above: None };
            world.good(&["mkdir", &world.at]);
            return world;
        }
        let above = tempfile::tempdir().unwrap();
        let at = above.path().join(own).into_os_string().into_string().unwrap();
        Self { at, behind: Some(tempfile::tempdir().unwrap()), _above: Some(above) }
    }

    /// A program that sees the folder at `self.at`.
    fn command(&self, arguments: &[&str]) -> Command {
        // Programs get only the standard descriptors, however the tests were started.
        // SAFETY: marks descriptors, takes no memory.
        unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) };
        let mut command = Command::new("timeout");
        command.args(["-k", "5", LIMIT_SECONDS]);
        command.env("PROBE_STATIC", probe("static")).env("HOME", env!("CARGO_TARGET_TMPDIR"));
        match &self.behind {
            None => {
                let wrapper = std::env::var("HEARTH_TEST_WRAPPER").unwrap_or_default();
                command.args(wrapper.split_whitespace()).args(arguments);
            }
            Some(folder) => {
                let settings = [
                    format!("HEARTH_AT={}", self.at),
                    format!("HEARTH_MIRROR_ROOT={}", folder.path().display()),
                    format!("XDG_CACHE_HOME={}", env!("CARGO_TARGET_TMPDIR")),
                    format!("LD_PRELOAD={}", library().display()),
                ];
                command.arg("env").args(settings).args(arguments);
            }
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs a program that has to succeed; returns its output.
    fn good(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {}\n{text}\n{error}", output.status);
        text
    }

    /// Runs a script in the folder.
    fn shell(&self, script: &str) -> String {
        self.good(&["sh", "-ec", &format!("cd {}\n{script}", self.at)])
    }

    /// Runs a C case in a new folder.
    fn probe(&self, case: &str) {
        let folder = format!("{}/{case}", self.at);
        self.good(&["mkdir", &folder]);
        self.good(&[probe("dynamic").to_str().unwrap(), case, &folder]);
    }

    fn probes(&self, cases: &[&str]) {
        cases.iter().for_each(|case| self.probe(case));
    }

    /// Checks the contents of a file in the mirror's own folder.
    fn holds(&self, name: &str, text: &str) {
        if let Some(folder) = &self.behind {
            assert_eq!(std::fs::read_to_string(folder.path().join(name)).unwrap(), text, "{name}");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.behind.is_none() {
            self.run(&["rm", "-rf", &self.at]);
        }
    }
}

#[test]
fn descriptors_behave_like_the_kernels() {
    World::new().probe("descriptors");
}

#[test]
fn ranges_of_descriptors_are_closed() {
    World::new().probe("close_ranges");
}

#[test]
fn a_program_runs_out_of_descriptors() {
    World::new().probe("numbers_run_out");
}

#[test]
fn files_are_always_ready() {
    World::new().probe("waits");
}

#[test]
fn processes_share_what_they_inherit() {
    let world = World::new();
    world.probes(&[
        "fork_shares_offset",
        "fork_exec",
        "vfork_exec",
        "vfork_umask",
        "vfork_first",
        "spawns",
        "programs",
        "forks_by_number",
        "threads_by_number",
    ]);
}

/// Compiles `alone.c`.
fn alone(name: &str, how: &[&str]) -> String {
    let program =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name).into_os_string().into_string().unwrap();
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/alone.c");
    let output =
        Command::new("cc").args(["-O1", "-Wall", "-o", &program, source]).args(how).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

#[test]
fn a_process_with_calls_that_the_library_does_not_see_counts_as_multithreaded() {
    let world = World::new();
    if world.behind.is_none() {
        return;
    }
    let (plain, calling) = (alone("alone", &[]), alone("alone-calling", &["-DOWN_CALL"]));
    let shared = ["-shared", "-fPIC", "-DNO_MAIN", "-DOWN_CALL"];
    let (harmless, other) = (alone("alone.so", &shared[..3]), alone("alone-calling.so", &shared));
    let said = |program: &str, more: &[&str]| world.good(&[&[program, &world.at], more].concat());
    assert_eq!(said(&plain, &[]), "11\n");
    assert_eq!(said(&calling, &[]), "00\n", "the program has a syscall of its own");
    assert_eq!(said(&plain, &[&harmless]), "11\n");
    assert_eq!(said(&plain, &[&other]), "10\n", "a library that is loaded later");
    world.good(&["cp", &harmless, &other, &world.at]);
    assert_eq!(said(&plain, &[&format!("{}/alone.so", world.at)]), "11\n");
    assert_eq!(said(&plain, &[&format!("{}/alone-calling.so", world.at)]), "10\n", "a library in the mount");
    assert_eq!(said(&plain, &["write"]), "10\n", "code that is written later");
    assert_eq!(said(&plain, &["change"]), "10\n", "memory that is made executable");
    for preloaded in [&harmless, &other] {
        let both = format!("LD_PRELOAD={}:{preloaded}", library().display());
        let expected = if *preloaded == other { "00\n" } else { "11\n" };
        assert_eq!(world.good(&["env", &both, &plain, &world.at]), expected, "another preloaded library");
    }
}

#[test]
fn a_static_program_gets_real_descriptors() {
    World::new().probe("statically");
}

#[test]
fn threads_and_cancellation() {
    let world = World::new();
    world.probes(&["threads", "cancels", "cancels_files"]);
}

#[test]
fn signals_wait_for_the_way_out() {
    let world = World::new();
    world.probes(&["signals", "lock_waits", "program_faults"]);
}

#[test]
fn a_handler_for_one_signal_is_called_once() {
    World::new().probe("handlers_for_once");
}

#[test]
fn signals_meet_children_and_the_next_program() {
    let world = World::new();
    world.probes(&["vfork_signals", "exec_signals"]);
}

#[test]
fn bad_memory_is_an_error_and_not_a_signal() {
    World::new().probe("bad_buffers");
}

#[test]
fn stdio_and_mappings() {
    let world = World::new();
    world.probes(&["stdio", "maps"]);
}

#[test]
fn names_attributes_and_links() {
    let world = World::new();
    world.probes(&["directories", "links", "attributes"]);
}

#[test]
fn calls_across_file_systems_and_refused_calls() {
    let world = World::new();
    world.probes(&["across", "refused", "chroots", "of_others"]);
}

/// The cases themselves are right: they pass on the kernel's own file system.
#[test]
fn the_cases_hold_for_the_kernel() {
    let skipped = [
        "across",
        "refused",
        "inherits",
        "vfork_opens",
        "vfork_moves",
        "statically",
        "ends_in_the_next_library",
    ];
    let source = include_str!("probe.c");
    let list = source.split("} cases[] = {").nth(1).unwrap().split("};").next().unwrap();
    let mut count = 0;
    for case in list.split('"').skip(1).step_by(2).filter(|case| !skipped.contains(case)) {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("timeout");
        let output =
            command.arg(LIMIT_SECONDS).arg(probe("dynamic")).arg(case).arg(folder.path()).output().unwrap();
        assert!(output.status.success(), "{case}: {}", String::from_utf8_lossy(&output.stderr));
        count += 1;
    }
    assert!(count > 15, "{count}");
}

#[test]
fn a_shell_and_other_tools() {
    let world = World::new();
    let printed = world.shell(
        "echo one >f; cat <f; cp f g; mv g h; (echo two; echo three) >>h; wc -l <h; sort h >s; cat s; grep -r t . | sort
         find . -type f | sort; mkdir -p d/e; tar cf t.tar f h; (cd d; tar xf ../t.tar; ls; pwd | grep -c /d$)
         exec 3<>rw; echo abc >&3; exec 3>&-; cat rw; ln -s f l; ls -l l | grep -c 'l -> f'; rm -r d; ls",
    );
    let expected = "one\n3\none\nthree\ntwo\n./h:three\n./h:two\n./s:three\n./s:two\n./f\n./h\n./s\ne\nf\nh\n1\nabc\n1\n\
                    f\nh\nl\nrw\ns\nt.tar\n";
    assert_eq!(printed, expected);
    world.holds("h", "one\ntwo\nthree\n");
}

/// `mkdir -p` makes each step relative to the one above, so the last steps have to reach the mount.
#[test]
fn paths_that_go_down_into_the_mount() {
    let world = World::new();
    world.good(&["mkdir", "-p", &format!("{}/a/b", world.at)]);
    let (above, name) = world.at.rsplit_once('/').unwrap();
    let script =
        format!("cd {above}; echo x >{name}/f; cat ./{name}/f; cd {name}/a/b; pwd; cat ../../f; ls ..");
    assert_eq!(world.good(&["sh", "-ec", &script]), format!("x\n{}/a/b\nx\nb\n", world.at));
    world.holds("f", "x\n");
    if world.behind.is_some() {
        assert!(!std::path::Path::new(&world.at).exists(), "nothing was created in the kernel's tree");
    }
}

/// The folder of the kernel's stands for the node's mount, and has other files than the tree, so that they tell which was used.
#[test]
fn every_way_leads_past_a_folder_of_the_kernels_at_the_same_path() {
    let world = World::new();
    if world.behind.is_none() {
        return;
    }
    let kernel = std::path::Path::new(&world.at);
    std::fs::create_dir_all(kernel.join("inner")).unwrap();
    let link = kernel.with_file_name("link");
    std::os::unix::fs::symlink(kernel, &link).unwrap();
    world.good(&["mkdir", "-p", &format!("{}/inner", world.at)]);
    let script = "
import os, sys
prefix, link = sys.argv[1:]
above, name = os.path.split(prefix)
here = os.open('/', os.O_PATH)
for part in prefix.split('/')[1:]:
    os.stat(part, dir_fd=here, follow_symlinks=False)
    here = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
os.close(os.open('descriptor', os.O_CREAT, dir_fd=here))
above = os.open(above, os.O_PATH)
os.mkdir(f'./{name}/inner/below', dir_fd=above)
os.rename(f'{name}/descriptor', f'{name}/inner/renamed', src_dir_fd=above, dst_dir_fd=above)
os.chdir(link)
os.mkdir('linked')
os.chdir(link + '/inner')
os.mkdir('../deeper')
print(os.getcwd(), sorted(os.listdir()), sorted(os.listdir('..')))
";
    let wanted = format!("{}/inner ['below', 'renamed'] ['deeper', 'inner', 'linked']\n", world.at);
    let script = ["/usr/bin/python3", "-c", script, &world.at, link.to_str().unwrap()];
    assert_eq!(world.good(&script), wanted);
    // A shell without the library was there.
    let mut command =
        world.command(&["sh", "-ec", "mkdir ../started; touch file; cat ../inner/file; ls ..; ls .; pwd"]);
    let said = command.current_dir(kernel.join("inner")).output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout);
    assert_eq!(said, format!("deeper\ninner\nlinked\nstarted\nbelow\nfile\nrenamed\n{}/inner\n", world.at));
    let made = |folder: &std::path::Path| std::fs::read_dir(folder).unwrap().count();
    assert_eq!(
        (made(kernel), made(&kernel.join("inner"))),
        (1, 0),
        "something was made in the kernel's folder"
    );
}

#[test]
fn bash_redirections() {
    let world = World::new();
    let script = "cd $0; echo a >x; { echo b; echo c >&2; } >>x 2>err; cat <<<here >y; mapfile -t lines <x
                  exec 5>z; ls -d . >&5; exec 5>&-; echo ${#lines[@]}; diff <(cat x) <(printf 'a\\nb\\n') && cat err y z";
    assert_eq!(world.good(&["bash", "-ec", script, &world.at]), "2\nc\nhere\n.\n");
    // The file has to arrive in programs that are started without the environment of the shell.
    world.shell("(cat; env -i cat) <x >copied; env -i sh -c 'cat x' >again; cmp x copied; cmp x again");
    world.holds("copied", "a\nb\n");
}

#[test]
fn python() {
    let world = World::new();
    if Command::new("python3").arg("--version").output().is_err() {
        return;
    }
    let script = "import os, subprocess, shutil, sys, tempfile\n\
        os.chdir(sys.argv[1]); assert os.getcwd() == sys.argv[1] and os.listdir('.') == []\n\
        text = 'x' * 100000; open('p', 'w').write(text); os.rename('p', 'q')\n\
        assert os.stat('q').st_size == 100000 and open('q').read() == text\n\
        assert subprocess.run(['cat', 'q'], capture_output=True).stdout == text.encode()\n\
        for _ in range(20):\n\
        \x20with open('out', 'a') as f: subprocess.run(['echo', 'hello'], stdout=f)\n\
        assert open('out').read() == 'hello\\n' * 20\n\
        shutil.copy('q', 'r'); os.makedirs('a/b/c'); shutil.copytree('a', 'd'); shutil.rmtree('a')\n\
        print(sorted(os.listdir('.')), [e.name for e in os.scandir('d')])\n\
        t = tempfile.NamedTemporaryFile(dir='.'); t.write(b'1'); t.flush(); os.fsync(t.fileno())\n\
        print(subprocess.run('pwd; echo y > y; cat y', shell=True, capture_output=True, text=True, cwd='d').stdout)\n\
        assert os.path.realpath('d/../q') == sys.argv[1] + '/q' and os.path.exists('d/y')\n";
    let printed = world.good(&["python3", "-c", script, &world.at]);
    assert_eq!(printed, format!("['d', 'out', 'q', 'r'] ['b']\n{}/d\ny\n\n", world.at));
}

#[test]
fn git() {
    let world = World::new();
    let printed = world.shell(
        "git -c init.defaultBranch=main init -q repo; cd repo; git config user.email a@b; git config user.name n
         for i in 1 2 3; do echo $i >f$i; git add .; git commit -qm $i; done; git log --oneline | wc -l
         git checkout -q -b other; echo x >>f1; git commit -qam x; git checkout -q main; git merge -q other
         git gc -q; git fsck 2>&1; git status --short; cat f1; cd ..; git clone -q repo copy; cat copy/f3",
    );
    assert_eq!(printed, "3\n1\nx\n3\n");
}

#[test]
fn sqlite() {
    let world = World::new();
    if Command::new("sqlite3").arg("--version").output().is_err() {
        return;
    }
    let sql = "create table t(a, b); insert into t values(1, 2); begin; insert into t values(3, 4); rollback;
               insert into t select value, value from generate_series(1, 1000); select count(*) from t;
               pragma integrity_check; pragma journal_mode;";
    let printed = world.good(&["sqlite3", &format!("{}/db", world.at), sql]);
    assert_eq!(printed, "1001\nok\ndelete\n");
}

#[test]
fn a_panic_poisons_the_mount_with_one_line() {
    let world = World::new();
    if world.behind.is_none() {
        return;
    }
    let script = "echo a >f || echo failed; echo b >g || echo failed; read x <f || echo failed; echo goes on";
    let command = format!("cd {} && {script}", world.at);
    let output = world.command(&["env", "HEARTH_MIRROR_PANIC=1", "sh", "-c", &command]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "failed\nfailed\nfailed\ngoes on\n", "{errors}");
    let lines = errors.lines().filter(|line| line.starts_with("hearth: ")).count();
    assert_eq!(lines, 1, "{errors}");
    assert!(errors.contains("write: ") && errors.contains("a panic that the test asked for"), "{errors}");
    assert!(errors.contains("Input/output error") || errors.contains("I/O error"), "{errors}");
}

/// A start takes its plan from the cache. If there is no folder for it, or the file is damaged or writable by other
/// users, the library is decoded, and everything works all the same.
#[test]
fn the_cache_of_plans() {
    let world = World::new();
    if world.behind.is_none() {
        return;
    }
    world.shell("echo x >f");
    let cache = tempfile::tempdir().unwrap();
    let setting = format!("XDG_CACHE_HOME={}", cache.path().display());
    let read = || {
        let file = format!("{}/f", world.at);
        assert_eq!(world.good(&["env", &setting, "sh", "-c", &format!("cat {file}")]), "x\n");
    };
    read();
    let folder = cache.path().join("hearth");
    let plans = || -> Vec<PathBuf> {
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    assert_eq!(plans().len(), 2, "one for libc, one for ld.so");
    let before: Vec<Vec<u8>> = plans().iter().map(|plan| std::fs::read(plan).unwrap()).collect();
    for plan in plans() {
        std::fs::write(plan, b"damaged").unwrap();
    }
    read();
    let after: Vec<Vec<u8>> = plans().iter().map(|plan| std::fs::read(plan).unwrap()).collect();
    assert_eq!(before, after, "written again");
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, b"not a folder").unwrap();
    read();
}
