//! A tree that is sent to another area, in rounds while it changes, is there in the end as it was at the last pin; a crash
//! at any moment leaves the area what it was before, or that.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

use area::{Area, AreaError, Import, KeyRange, LedgerPlace, Limits, Snapshot};
use format::node::{ItemKind, Key};
use format::{InodeNumber, Life, Sequence};
use pmem::crash::{Model, Point};
use pmem::{Medium, Recorder};
use support::{
    AreaState, Draws, Step, cases, commit, file, findings, pool, proving, state_of, text, truncate, unlink,
    write,
};

/// Nodes of the trees.
const NODES: u32 = 1024;

fn head_limits() -> Limits {
    Limits {
        capacity_blocks: 4096,
        segment_blocks: 512,
        batch_nodes_max: 256,
        cached_nodes: 64,
        ..support::tiny()
    }
}

/// Segments so small that most extents of the head are several here, and few nodes in memory.
fn joiner_limits() -> Limits {
    Limits { segment_blocks: 24, batch_nodes_max: 3, ..head_limits() }
}

fn place(sequence: u64) -> LedgerPlace {
    LedgerPlace { sequence: Sequence::new(sequence), position: 4096, life: Life::new(3) }
}

/// Sends ranges of a commit; `between` is called now and then, while the commit is kept.
fn send(snapshot: &Snapshot, ranges: &[KeyRange], import: &mut Import, between: &mut dyn FnMut()) {
    for range in ranges {
        import.begin_range(*range).unwrap();
        let mut after: Option<Key> = None;
        loop {
            let items = snapshot.items_of(range, after.as_ref(), 3).unwrap();
            let Some((last, _)) = items.last() else { break };
            after = Some(*last);
            between();
            for (key, value) in &items {
                send_item(snapshot, key, value, import);
            }
        }
    }
}

fn send_item(snapshot: &Snapshot, key: &Key, value: &[u8], import: &mut Import) {
    match key.kind().unwrap() {
        ItemKind::Segment => {}
        ItemKind::Extent => {
            let (extents, owner) = snapshot.extents_of(key, value).unwrap();
            import.put(*key, value, owner).unwrap();
            for extent in extents.iter().filter(|extent| extent.checksums.is_some()) {
                for block in extent.first..extent.end() {
                    let (bytes, is_whole) = snapshot.block_as_is(extent, block).unwrap();
                    import.put_block(&bytes, !is_whole).unwrap();
                }
            }
        }
        _ => import.put(*key, value, 0).unwrap(),
    }
}

/// The whole tree in one round.
fn import_of(from: &Area, to: Area, ledger: u64) -> Area {
    let mut import = Import::begin(to).unwrap();
    import.begin_round(from.version()).unwrap();
    send(from, &[from.whole()], &mut import, &mut || {});
    import.sync().unwrap();
    import.finish(&place(ledger), from.totals()).unwrap()
}

/// A head that changes by random steps.
struct Head {
    area: Area,
    draws: Draws,
    version: u64,
    sequence: u64,
    /// Files, and how many of them are users' own.
    files: Vec<u64>,
    made: u64,
    /// Most files have large extents.
    large: bool,
}

/// One commit with these steps, the first of which is the one after `sequence`.
fn execute(area: &mut Area, steps: &[Step], sequence: u64, version: u64) {
    let mut batch = area.begin().unwrap();
    if version.is_multiple_of(2) {
        batch.gather_writes();
    }
    for (step, sequence) in steps.iter().zip(sequence + 1..) {
        step.apply(&mut batch, sequence).unwrap();
    }
    let commit = batch.commit(Sequence::new(version)).unwrap().commit;
    area.release(commit).unwrap();
}

impl Head {
    /// The steps of one entry of the ledger.
    fn draw(&mut self) -> Vec<Step> {
        let count = 1 + self.draws.below(3);
        let mut steps: Vec<Step> = (0..count).map(|_| self.step()).collect();
        if self.large {
            return steps;
        }
        if let Some(inode) = self.files.first().copied().filter(|_| count == 1) {
            let first = self.draws.below(100);
            steps.extend(support::write_apart(inode, (first..first + 70).step_by(3), count as u8));
        }
        steps
    }

    fn change(&mut self) {
        let steps = self.draw();
        // A later commit may execute the rest of the same entry.
        self.version += u64::from(self.draws.below(4) > 0);
        execute(&mut self.area, &steps, self.sequence, self.version);
        self.sequence += steps.len() as u64;
    }

    fn step(&mut self) -> Step {
        let draw = self.draws.below(10);
        if self.files.len() < 3 || (draw < 2 && self.files.len() < 60) {
            self.made += 1;
            let inode = if self.made.is_multiple_of(3) { 9_000 + self.made } else { 100 + self.made };
            self.files.push(inode);
            return file(inode, 1, format!("file-{}", self.made));
        }
        let index = self.draws.below(self.files.len() as u64) as usize;
        let inode = self.files[index];
        let block = self.draws.below(120) * 4096;
        match draw {
            2 => {
                self.files.remove(index);
                let number = if inode > 9_000 { inode - 9_000 } else { inode - 100 };
                unlink(inode, 1, format!("file-{number}"))
            }
            3 if !self.large => truncate(inode, block / 2),
            4 => {
                let blocks = 1 + self.draws.below(60) as usize;
                write(inode, block, draw as u8, blocks * 4096)
            }
            5 => support::punch(inode, block, 4096 * (1 + self.draws.below(20))),
            6 => support::allocate(inode, block, 4096 * (1 + self.draws.below(20)), false),
            _ if self.large && draw < 9 => {
                write(inode, block, draw as u8, (20 + self.draws.below(80) as usize) * 4096)
            }
            _ => write(inode, block + self.draws.below(5000), draw as u8, 100),
        }
    }
}

/// Gives how many rounds left something alone, and how many block lists the head had in the end.
fn rounds(seed: u64) -> (usize, usize) {
    let (one, two) = (Recorder::new(), Recorder::new());
    let area = pool(&one.medium(), NODES, head_limits());
    let mut head =
        Head { area, draws: Draws(seed), version: 1, sequence: 0, files: Vec::new(), made: 0, large: false };
    (0..150).for_each(|_| head.change());
    // The joiner's own files are removed.
    let mut own = pool(&two.medium(), NODES, joiner_limits());
    commit(&mut own, &cases::base(), 1).unwrap();
    let left_alone = bring(&mut head, Import::begin(own).unwrap(), None, &format!("seed {seed}"));
    let lists = support::lists_of(&head.area);
    findings(&one.medium()).unwrap();
    goes_on(&two.medium(), &head);
    (left_alone, lists)
}

/// The member's tree is sound, and it goes on as any other area.
fn goes_on(medium: &Medium, head: &Head) {
    findings(medium).unwrap();
    let mut joined = Area::open(medium, joiner_limits()).unwrap();
    joined.end_import().unwrap();
    assert!(!joined.is_imported());
    let mut batch = joined.begin().unwrap();
    file(50, 1, "after").apply(&mut batch, head.sequence + 1).unwrap();
    batch.commit(Sequence::new(head.version + 1)).unwrap();
    findings(medium).unwrap();
}

/// Sends the tree of a head that changes, or if an entry is given what changed from it on here or at the member. Gives how
/// many rounds left something alone.
fn bring(head: &mut Head, mut import: Import, since: Option<u64>, told: &str) -> usize {
    let (mut from, mut left_alone) = (None, 0);
    for round in 0..4 {
        let (snapshot, pin) = head.area.pin();
        let (ranges, _) = match (from, since) {
            (None, None) => (vec![snapshot.whole()], 0),
            (None, Some(since)) => {
                let there = import.changed_from(Sequence::new(since)).unwrap();
                snapshot.changed_here_or_there(Sequence::new(since), there).unwrap()
            }
            (Some(from), _) => snapshot.changed_from(from).unwrap(),
        };
        left_alone += usize::from(!ranges.contains(&snapshot.whole()));
        import.begin_round(snapshot.version()).unwrap();
        let mut changes = 0;
        send(&snapshot, &ranges, &mut import, &mut || {
            changes += 1;
            if changes % 40 == 0 && round < 3 && since.is_none() {
                head.change();
            }
        });
        import.sync().unwrap();
        assert!(pin.is_held());
        from = Some(snapshot.version());
        if round == 3 {
            let joined = import.finish(&place(head.version), snapshot.totals()).unwrap();
            assert!(joined.is_imported() && joined.ledger() == place(head.version));
            let (ours, theirs) = (state_of(&head.area).unwrap(), state_of(&joined).unwrap());
            assert!(ours == theirs, "{told}: {}", differs(&ours, &theirs));
            break;
        }
        drop(pin);
        let commit = head.area.commit();
        head.area.release(commit).unwrap();
        head.change();
    }
    left_alone
}

/// A member that executed the same entries up to one, and perhaps others after it, gets only what differs.
fn returns(seed: u64) -> usize {
    let (one, two) = (Recorder::new(), Recorder::new());
    // Of one file the head has more extents than the member, or fewer. Both remove each file in one step, which depends on
    // the number of its extents otherwise.
    let segment_blocks = if seed.is_multiple_of(2) { (512, 24) } else { (24, 512) };
    let limits = |segment_blocks| Limits {
        segment_blocks,
        batch_nodes_max: 256,
        reap_items_max: 1 << 10,
        capacity_blocks: 1 << 14,
        ..head_limits()
    };
    let area = pool(&one.medium(), NODES, limits(segment_blocks.0));
    let mut head =
        Head { area, draws: Draws(seed), version: 1, sequence: 0, files: Vec::new(), made: 0, large: false };
    head.large = seed % 4 < 3;
    let mut own = pool(&two.medium(), NODES, limits(segment_blocks.1));
    let mut draws = Draws(seed ^ 0x5eed);
    let (mut to_execute, mut sequence) = (Vec::new(), 0);
    for entry in 0..100 {
        let steps = head.draw();
        head.version += 1;
        execute(&mut head.area, &steps, head.sequence, head.version);
        head.sequence += steps.len() as u64;
        to_execute.extend(steps);
        if entry == 99 || draws.below(3) == 0 {
            execute(&mut own, &to_execute, sequence, head.version);
            (to_execute, sequence) = (Vec::new(), head.sequence);
        }
    }
    let (ours, theirs) = (state_of(&head.area).unwrap(), state_of(&own).unwrap());
    assert!(ours == theirs, "seed {seed}, the common history: {}", differs(&ours, &theirs));
    head.version += 1;
    let since = head.version;
    let mut member = Head { area: own, draws, files: head.files.clone(), made: head.made + 500, ..head };
    let others = member.draws.below(3) * member.draws.below(8);
    (0..others).for_each(|_| member.change());
    (0..member.draws.below(4) * member.draws.below(8)).for_each(|_| head.change());
    drop(member);
    let limits = Limits { batch_nodes_max: 3, ..limits(segment_blocks.1) };
    let own = Area::open(&two.medium(), limits).unwrap();
    let import = Import::begin_with_own(own).unwrap();
    let left_alone = bring(&mut head, import, Some(since), &format!("seed {seed}, {others} other entries"));
    findings(&one.medium()).unwrap();
    goes_on(&two.medium(), &head);
    left_alone
}

fn differs(ours: &AreaState, theirs: &AreaState) -> String {
    let wrong = |inode: &&u64| ours.get(inode) != theirs.get(inode);
    let inodes: Vec<&u64> = ours.keys().chain(theirs.keys()).filter(wrong).collect();
    format!("inodes {inodes:?}")
}

#[test]
fn a_tree_that_changes_while_it_is_sent_is_there_in_the_end() {
    let (mut left_alone, mut lists) = (0, 0);
    for (more_left_alone, more_lists) in (0..if proving() { 400 } else { 40 }).map(rounds) {
        (left_alone, lists) = (left_alone + more_left_alone, lists + more_lists);
    }
    assert!(left_alone > 20 && lists > 40, "{left_alone} rounds left something alone, {lists} lists");
}

#[test]
fn a_member_with_a_common_history_gets_what_differs() {
    let left_alone: usize = (0..if proving() { 1000 } else { 60 }).map(returns).sum();
    assert!(left_alone > 60, "{left_alone} rounds left something alone");
}

/// One file of many extents, which lie otherwise at the member; the bounds of what changed are within the file.
fn returns_with_a_large_file(seed: u64) {
    const BLOCKS: u64 = 3000;
    let (one, two) = (Recorder::new(), Recorder::new());
    let segment_blocks = if seed.is_multiple_of(2) { (512, 24) } else { (24, 512) };
    let limits = |segment_blocks| Limits {
        segment_blocks,
        batch_nodes_max: 256,
        capacity_blocks: 1 << 14,
        ..head_limits()
    };
    let mut head = pool(&one.medium(), NODES, limits(segment_blocks.0));
    let mut own = pool(&two.medium(), NODES, limits(segment_blocks.1));
    let mut draws = Draws(seed);
    let mut places: Vec<(u64, u64)> = Vec::new();
    let mut overwrite = |longest: u64, byte: u8| {
        let blocks = 1 + draws.below(longest);
        let mut place = (draws.below(BLOCKS - blocks), blocks);
        // The same blocks once more: an extent that reached across the bound of a node does so again.
        if byte > 3 && draws.below(4) > 0 {
            place = places[places.len() - 1 - draws.below(12) as usize];
        }
        places.push(place);
        write(101, place.0 * 4096, byte, place.1 as usize * 4096)
    };
    let mut steps = vec![file(101, 1, "large"), write(101, 0, 1, BLOCKS as usize * 4096)];
    steps.extend((0..20).map(|_| overwrite(3, 2)));
    steps.extend((0..12).map(|_| overwrite(300, 3)));
    for area in [&mut head, &mut own] {
        for (step, number) in steps.iter().zip(1..) {
            execute(area, std::slice::from_ref(step), number, 2 * number + 1);
        }
    }
    let (sequence, since) = (steps.len() as u64 + 1, 2 * steps.len() as u64 + 2);
    for number in 0..2 {
        execute(&mut own, &[overwrite(100, 4)], sequence + number, since + number);
    }
    if seed.is_multiple_of(3) {
        execute(&mut head, &[overwrite(400, 5)], sequence, since);
    }
    for (_, end) in own.changed_spans(Sequence::new(since)).unwrap() {
        let Some(end) = end.filter(|key| key.kind() == Ok(ItemKind::Extent) && key.sub() > 0) else {
            continue;
        };
        let before = own.extents(InodeNumber::new(end.object()), end.sub() - 1..end.sub(), 1).unwrap();
        assert!(
            before.iter().all(|extent| extent.end() <= end.sub()),
            "seed {seed}: {before:?} reaches beyond"
        );
    }
    let mut import = Import::begin_with_own(own).unwrap();
    let there = import.changed_from(Sequence::new(since)).unwrap();
    let (ranges, _) = head.changed_here_or_there(Sequence::new(since), there).unwrap();
    import.begin_round(Sequence::new(since + 2)).unwrap();
    send(&head, &ranges, &mut import, &mut || {});
    let joined = import.finish(&place(since), head.totals()).unwrap();
    let (ours, theirs) = (state_of(&head).unwrap(), state_of(&joined).unwrap());
    assert!(ours == theirs, "seed {seed}");
    findings(&two.medium()).unwrap();
}

#[test]
fn a_file_with_other_extents_at_the_member_is_there_in_the_end() {
    (0..if proving() { 400 } else { 40 }).for_each(returns_with_a_large_file);
}

#[test]
fn a_crash_leaves_what_was_there_or_all_that_came() {
    let source = Recorder::new();
    let mut from = pool(&source.medium(), 256, support::tiny());
    commit(&mut from, &[file(40, 1, "other"), write(40, 0, 7, 50_000), file(9_001, 1, "own")], 1).unwrap();
    commit(&mut from, &[write(9_001, 100, 4, 9_000)], 10).unwrap();
    let prepare = |own: &mut Area| commit(own, &cases::base(), 1).unwrap();
    crash_of(&from, &prepare, &|own| import_of(&from, own, 9));
}

/// The same of a member that gets only what differs; a second round brings the same blocks again.
#[test]
fn a_crash_leaves_what_was_there_or_all_that_came_into_it() {
    let common = [file(40, 1, "other"), write(40, 0, 7, 50_000), file(9_001, 1, "own"), file(41, 1, "third")];
    let source = Recorder::new();
    let mut from = pool(&source.medium(), 256, support::tiny());
    execute(&mut from, &common, 0, 3);
    execute(&mut from, &[write(9_001, 100, 4, 9_000), write(40, 8_192, 9, 20_000)], 4, 4);
    let prepare = |own: &mut Area| {
        execute(own, &common, 0, 3);
        execute(own, &[write(40, 4_096, 5, 30_000), unlink(41, 1, "third"), file(60, 1, "more")], 4, 4);
    };
    let import = |own| {
        let mut import = Import::begin_with_own(own).unwrap();
        let there = import.changed_from(Sequence::new(4)).unwrap();
        let (ranges, _) = from.changed_here_or_there(Sequence::new(4), there).unwrap();
        for _ in 0..2 {
            import.begin_round(from.version()).unwrap();
            send(&from, &ranges, &mut import, &mut || {});
            import.sync().unwrap();
        }
        import.finish(&place(9), from.totals()).unwrap()
    };
    crash_of(&from, &prepare, &import);
}

/// Crashes at each point of an import of this tree.
fn crash_of(from: &Area, prepare: &dyn Fn(&mut Area), import: &dyn Fn(Area) -> Area) {
    let after = state_of(from).unwrap();
    let mut before = AreaState::new();
    for model in [Model::Lines, Model::Pages] {
        let mut workload = |recorder: &Recorder| {
            let mut own = pool(&recorder.medium(), 256, support::tiny());
            prepare(&mut own);
            before = state_of(&own).unwrap();
            recorder.returned(1);
            drop(import(own));
            recorder.returned(2);
        };
        let recover = |medium: &Medium| match Area::open(medium, support::tiny()) {
            Err(AreaError::Missing) => Ok(None),
            opened => Ok(Some(opened.map_err(text)?)),
        };
        let limits = pmem::crash::Limits::quick();
        // The state before is known when the workload is done.
        let recorder = Recorder::new();
        workload(&recorder);
        let judge = |opened: Option<Area>, medium: &Medium, point: &Point| {
            let last = point.returned.last().copied().unwrap_or(0);
            let Some(area) = opened else { return if last == 0 { Ok(()) } else { Err("lost".to_owned()) } };
            findings(medium)?;
            let state = state_of(&area).map_err(text)?;
            match (area.is_imported(), last) {
                (true, _) if state == after && area.ledger() == place(9) => Ok(()),
                (true, _) => Err("not all of the import".to_owned()),
                (false, 2) => Err("the import is lost".to_owned()),
                (false, 1) if state != before => Err("not what it was".to_owned()),
                (false, _) => Ok(()),
            }
        };
        let counts = pmem::crash::crash_recorded(&recorder, model, &limits, recover, judge);
        let counts = counts.unwrap_or_else(|violation| panic!("{violation}"));
        assert!(counts.images > 20, "{counts}");
    }
}

#[test]
fn what_is_no_tree_is_refused() {
    let source = Recorder::new();
    let mut from = pool(&source.medium(), 256, support::tiny());
    commit(&mut from, &[file(40, 1, "other"), write(40, 0, 7, 9_000)], 1).unwrap();
    let items: Vec<_> = from.range(None, usize::MAX).unwrap();
    let begin = || {
        let recorder = Recorder::new();
        let mut import = Import::begin(pool(&recorder.medium(), 256, support::tiny())).unwrap();
        import.begin_round(Sequence::new(5)).unwrap();
        import
    };
    let is_refused = |done: Result<(), AreaError>| {
        assert!(matches!(done, Err(AreaError::Import(_) | AreaError::Item(..))), "{done:?}");
    };
    let inode = Key::new(40, ItemKind::Inode, 0);
    let value = from.get(&inode).unwrap().unwrap();
    let extent = items.iter().find(|(key, _)| key.kind() == Ok(ItemKind::Extent)).unwrap();
    is_refused(begin().put(inode, &value, 0));
    let whole = || {
        let mut import = begin();
        import.begin_range(from.whole()).unwrap();
        import
    };
    is_refused(whole().put(inode, &value[1..], 0));
    is_refused(whole().put(Key::new(0, ItemKind::Segment, 1), &[0; 16], 0));
    is_refused(whole().put(extent.0, &extent.1[..extent.1.len() - 4], 0));
    is_refused(whole().put_block(&[0; 4096], false));
    let mut twice = whole();
    twice.put(inode, &value, 0).unwrap();
    is_refused(twice.put(inode, &value, 0));
    is_refused(twice.begin_round(Sequence::new(4)));
    let mut other_bytes = whole();
    other_bytes.put(extent.0, &extent.1, 0).unwrap();
    is_refused(other_bytes.put_block(&[0; 4096], false));
    is_refused(other_bytes.sync());
    let mut less = whole();
    less.put(inode, &value, 0).unwrap();
    is_refused(less.finish(&place(1), from.totals()).map(|_| ()));
}
