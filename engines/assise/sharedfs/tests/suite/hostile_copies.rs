//! Programs that harm what a copy holds: a commit word that promises more than the log has, and records over those that the
//! copy has not executed. Neither keeps other programs waiting, nor costs the chain its copy.

use crate::client::{Client, DIRECTORY, FILE, ROOT, user};
use crate::pair::{Pair, sync};
use crate::second_copy::{difference, items};
use format::Sequence;
use ipc::words::FenceBy;
use pmem::Recorder;
use pmem::ring::RingPosition;

fn assert_level(pair: &Pair, recorders: &[Recorder; 2]) {
    for id in pair.daemon.sessions() {
        pair.daemon.end(id);
    }
    pair.quiesce();
    assert!(pair.daemon.copies()[0].connected);
    let (ours, theirs) = (items(&recorders[0].medium(), false), items(&recorders[1].medium(), false));
    assert!(ours == theirs, "{:#?}", difference(&ours.0, &theirs.0));
}

#[test]
fn a_commit_word_beyond_the_log_holds_nobody_up() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut hostile = Client::attach_as(&pair.daemon, user(0), 1);
    let mut other = Client::attach_as(&pair.daemon, user(0), 2);
    hostile.write_lease(ROOT);
    let (folder, _) = hostile.create(ROOT, b"folder", DIRECTORY | 0o777);
    hostile.create(folder, b"whole", FILE | 0o644);
    hostile.pages.commit().commit(Sequence::new(1 << 40), FenceBy::Operation);
    // It gets the folder, with what counts.
    let folder = other.walk("folder").unwrap().inode;
    other.write_lease(folder);
    assert!(other.walk("folder/whole").is_ok());
    let (file, _) = other.create(folder, b"of the other", FILE | 0o644);
    sync(&other, &[(file, 1)]).unwrap();
    assert_eq!(pair.daemon.terminations().len(), 1);
    assert_level(&pair, &recorders);
}

#[test]
fn a_program_that_ignores_how_much_is_reusable_is_cut() {
    let recorders = [Recorder::new(), Recorder::new()];
    let pair = Pair::on(&recorders[0], &recorders[1]);
    let mut hostile = Client::attach_as(&pair.daemon, user(0), 1);
    hostile.write_lease(ROOT);
    let (file, _) = hostile.create(ROOT, b"file", FILE | 0o644);
    hostile.digest(true).unwrap();
    pair.quiesce();
    hostile.release();
    // Twice the ring at once, without a look at what others have.
    let mut sent = 0;
    for round in 0..60u64 {
        if hostile.ring.free_bytes() < 4_000 {
            let RingPosition { position, sequence } = hostile.ring.tail();
            hostile.ring.release_to(RingPosition { position, sequence });
        }
        sent += u64::from(hostile.write(file, round * 2_000, &[round as u8; 2_000]));
    }
    assert!(sent > 30);
    let mut other = Client::attach_as(&pair.daemon, user(0), 2);
    other.walk("file").unwrap();
    other.write_lease(file);
    assert!(other.write(file, 0, b"of the other"));
    sync(&other, &[(file, 1)]).unwrap();
    assert_eq!(pair.daemon.terminations().len(), 1);
    assert_level(&pair, &recorders);
}
