//! `poll` and `select`: files of ours are ready at once, as regular files are; the kernel waits for the others.

use crate::descriptors;
use crate::dispatch::{Answer, Call, Refusal, is_path};
use crate::memory;
use crate::raw;

/// Limit of entries of a `poll` that the library reads: a process cannot have more descriptors open.
const ENTRIES_MAX: u64 = 1 << 20;
const READY: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDNORM | libc::POLLWRNORM;
const NO_TIME: [i64; 2] = [0, 0];

/// `poll` and `ppoll`.
pub fn poll(call: &Call) -> Answer {
    let [address, count, timeout, mask, mask_bytes, _] = call.arguments;
    if !descriptors::any() || count > ENTRIES_MAX {
        return Err(Refusal::Pass);
    }
    let mut entries = Vec::new();
    for index in 0..count {
        entries.push(memory::read_value::<libc::pollfd>(address + index * 8)?);
    }
    let ours: Vec<bool> = entries.iter().map(|entry| descriptors::is_ours(entry.fd)).collect();
    if !ours.contains(&true) {
        return Err(Refusal::Pass);
    }
    let mut asked = entries.clone();
    let mut ready = 0;
    for ((entry, asked), _) in entries.iter_mut().zip(&mut asked).zip(&ours).filter(|(_, ours)| **ours) {
        asked.fd = -1;
        let path = descriptors::get(entry.fd).is_ok_and(|held| is_path(&held));
        entry.revents = if path { libc::POLLNVAL } else { entry.events & READY };
        ready += u64::from(entry.revents != 0);
    }
    let precise = call.number == 271;
    let timeout = match (ready > 0, precise) {
        (true, true) => NO_TIME.as_ptr() as u64,
        (true, false) => 0,
        (false, _) => timeout,
    };
    let arguments = [asked.as_mut_ptr() as u64, count, timeout, mask, mask_bytes, 0];
    // SAFETY: the entries belong to the library; timeout and mask are the program's own.
    ready += raw::outcome(unsafe { raw::call(call.number as u64, &arguments) })?;
    for (index, (entry, asked)) in entries.iter().zip(&asked).enumerate() {
        let events = if ours[index] { entry.revents } else { asked.revents };
        memory::write_value(address + index as u64 * 8 + 6, &events)?;
    }
    Ok(ready)
}

/// `ppoll`
pub fn ppoll(call: &Call) -> Answer {
    poll(call)
}

/// `select` and `pselect6`.
pub fn select(call: &Call) -> Answer {
    let count = u64::from(call.int(0).max(0).cast_unsigned()).min(ENTRIES_MAX);
    if !descriptors::any() || count == 0 {
        return Err(Refusal::Pass);
    }
    let words = count.div_ceil(64) as usize;
    let mut sets: [Vec<u64>; 3] = Default::default();
    for (set, address) in sets.iter_mut().zip(&call.arguments[1..4]).filter(|(_, address)| **address != 0) {
        for index in 0..words {
            set.push(memory::read_value(address + index as u64 * 8)?);
        }
    }
    let bit =
        |set: &Vec<u64>, fd: i32| set.get(fd as usize / 64).is_some_and(|word| word >> (fd % 64) & 1 == 1);
    let ours = descriptors::ours().into_iter().filter(|fd| (*fd as u64) < count);
    let ours: Vec<i32> = ours.filter(|fd| sets.iter().any(|set| bit(set, *fd))).collect();
    if ours.is_empty() {
        return Err(Refusal::Pass);
    }
    // Reading and writing are always possible; there is never an exceptional condition.
    let mut ready: Vec<(usize, i32)> = Vec::new();
    for (index, set) in sets.iter_mut().enumerate() {
        for fd in &ours {
            if bit(set, *fd) {
                set[*fd as usize / 64] &= !(1 << (fd % 64));
                if index < 2 {
                    ready.push((index, *fd));
                }
            }
        }
    }
    let mut no_time = NO_TIME;
    let timeout = if ready.is_empty() { call.arguments[4] } else { no_time.as_mut_ptr() as u64 };
    let mut arguments = call.arguments;
    for (argument, set) in arguments[1..4].iter_mut().zip(&mut sets).filter(|(argument, _)| **argument != 0) {
        *argument = set.as_mut_ptr() as u64;
    }
    arguments[4] = timeout;
    // SAFETY: the sets belong to the library and have the length of the count; the rest is the program's own.
    let found = raw::outcome(unsafe { raw::call(call.number as u64, &arguments) })?;
    for &(index, fd) in &ready {
        sets[index][fd as usize / 64] |= 1 << (fd % 64);
    }
    for (set, address) in sets.iter().zip(&call.arguments[1..4]) {
        for (index, word) in set.iter().enumerate() {
            memory::write_value(address + index as u64 * 8, word)?;
        }
    }
    Ok(found + ready.len() as u64)
}

/// `pselect6`
pub fn pselect6(call: &Call) -> Answer {
    select(call)
}
