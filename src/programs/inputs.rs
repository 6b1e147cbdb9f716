//! The inputs of the measured programs: made once, on a tmpfs, the same each time.

use crate::error::{Error, Result};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Folders of the tree, and files in each.
const FOLDERS: usize = 200;
const FILES: usize = 20;
/// The longest file, in bytes; most are much shorter.
const LONGEST: usize = 40_000;
/// One file of so many has the word that is looked for.
const NEEDLE_EACH: usize = 100;
/// Transactions of a database.
const TRANSACTIONS: usize = 3000;
/// Files of the program in C, and modules of the one in Rust.
const C_FILES: usize = 40;
const MODULES: usize = 20;

/// A web application in little: each request reads and writes in a transaction of its own.
const WEB: &str = "import sqlite3, sys
for number in range(300):
    database = sqlite3.connect(sys.argv[1])
    if number == 0:
        database.execute('pragma journal_mode=' + sys.argv[2])
        database.execute('create table t(number integer primary key, text)')
    database.execute('select count(*) from t').fetchone()
    with database:
        database.execute('insert into t values(?, ?)', (number, 'x' * 200))
    database.close()
";

const FILES_JS: &str = "const fs = require('fs'), folder = process.argv[2];
for (let number = 0; number < 500; number++) {
  fs.writeFileSync(`${folder}/f${number}`, 'x'.repeat(5000));
  if (fs.readFileSync(`${folder}/f${number}`).length !== 5000) process.exit(1);
}
";

const GO: &str = "package main\nimport \"fmt\"\nfunc main() {\nfmt.Println( 1+2 )\n}\n";

/// Makes all inputs in a folder.
///
/// # Errors
/// A file cannot be written.
pub fn make(folder: &Path) -> Result<()> {
    tree(&folder.join("tree"))?;
    for (name, mode) in [("rollback.sql", ""), ("wal.sql", "pragma journal_mode=wal;\n")] {
        let mut text = format!("{mode}create table t(number integer primary key, text);\n");
        for number in 0..TRANSACTIONS {
            let _ = writeln!(text, "insert into t values({number}, 'the text of row {number}');");
        }
        write(&folder.join(name), &text)?;
    }
    write(&folder.join("web.py"), WEB)?;
    write(&folder.join("files.js"), FILES_JS)?;
    write(&folder.join("a.go"), GO)?;
    program_in_c(&folder.join("c"))?;
    crate_of_rust(&folder.join("crate"))
}

/// Many small files, as sources are.
fn tree(folder: &Path) -> Result<()> {
    let mut state = 1u64;
    for number in 0..FOLDERS {
        let within = folder.join(format!("d{number:03}"));
        fs::create_dir_all(&within).map_err(Error::at("make", &within))?;
        for index in 0..FILES {
            let file = number * FILES + index;
            // The cube of a number below 1: most are near 0.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let part = (state >> 40) as f64 / f64::from(1 << 24);
            let bytes = 100 + (part.powi(3) * LONGEST as f64) as usize;
            let mut text = String::with_capacity(bytes + 64);
            if file.is_multiple_of(NEEDLE_EACH) {
                text.push_str("needle\n");
            }
            while text.len() < bytes {
                let _ = writeln!(text, "{:016x} line {} of file {file}", state, text.len());
                state = state.rotate_left(7) ^ text.len() as u64;
            }
            write(&within.join(format!("f{index:04}")), &text)?;
        }
    }
    Ok(())
}

fn program_in_c(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(Error::at("make", folder))?;
    let (mut calls, mut header, mut objects) = (String::new(), String::new(), String::from("main.o"));
    for number in 0..C_FILES {
        let text = format!("#include \"all.h\"\n#include <stdio.h>\nint of_{number}(void) {{ return 1; }}\n");
        write(&folder.join(format!("f{number}.c")), &text)?;
        let _ = writeln!(header, "int of_{number}(void);");
        let _ = write!(calls, " + of_{number}()");
        let _ = write!(objects, " f{number}.o");
    }
    write(&folder.join("all.h"), &header)?;
    let main = format!(
        "#include \"all.h\"\n#include <stdio.h>\nint main(void) {{ printf(\"%d\\n\", 0{calls}); return 0; }}\n"
    );
    write(&folder.join("main.c"), &main)?;
    write(&folder.join("Makefile"), &format!("built: {objects}\n\t$(CC) -o built {objects}\n"))
}

fn crate_of_rust(folder: &Path) -> Result<()> {
    let sources = folder.join("src");
    fs::create_dir_all(&sources).map_err(Error::at("make", &sources))?;
    write(
        &folder.join("Cargo.toml"),
        "[package]\nname = \"built\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[workspace]\n",
    )?;
    let (mut modules, mut sum) = (String::new(), String::from("0"));
    for number in 0..MODULES {
        write(&sources.join(format!("m{number}.rs")), "pub fn one() -> u32 { [1u32].iter().sum() }\n")?;
        let _ = writeln!(modules, "mod m{number};");
        let _ = write!(sum, " + m{number}::one()");
    }
    write(&sources.join("main.rs"), &format!("{modules}fn main() {{ println!(\"{{}}\", {sum}) }}\n"))
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).map_err(Error::at("write", file))
}
