//! Decides which instructions of a library move into trampolines. The plan depends only on the library's code, so it is
//! valid for every process that has the same build loaded, at any address.
//!
//! A jump has five bytes and a `syscall` two, so neighbouring instructions have to move with it. The *window* is the
//! smallest run of instructions around the `syscall` that can run at another address, and into which no code jumps
//! (direct branches and addresses taken, over the whole text). Instructions before the `syscall` are preferred: a
//! target of a jump table is never between the load of the call's number and the `syscall`.
//!
//! The `syscall` of a clone stays in place, between two calls of the library, because the kernel may return from it on
//! another stack. If the number is only known at run time (the C library's `syscall()`), the trampoline checks it and
//! takes one of the two ways.

use super::image::Library;
use crate::dispatch::KINDS;
use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};
use std::borrow::Cow;

/// Bytes of `jmp rel32`.
pub const JUMP_BYTES: usize = 5;
/// Limit of bytes of a window.
pub const WINDOW_BYTES_MAX: usize = 40;
/// Number of instructions on either side of a `syscall` that are considered.
const REACH: usize = 8;
/// clone, fork, vfork, clone3: the calls that create processes and threads.
const CLONES: [u32; 4] = [56, 57, 58, 435];
const SYS_RT_SIGRETURN: u64 = 15;

/// The target of a field of a trampoline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FixupTarget {
    /// An offset in the library.
    Library(u64),
    /// One of the addresses of the entry code, which are stored beside the trampolines.
    Entry(u8),
}

/// A 32-bit field of a trampoline, relative to a position in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixup {
    /// Offset of the field in the trampoline.
    pub at: u8,
    /// The offset to which it is relative: the end of its instruction.
    pub from: u8,
    /// Its target.
    pub to: FixupTarget,
}

/// One `syscall` instruction and its window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site<'a> {
    /// Offset of the window in the library.
    pub offset: u64,
    /// The original bytes of the window.
    pub original: Cow<'a, [u8]>,
    /// The trampoline.
    pub code: Cow<'a, [u8]>,
    /// Its fields.
    pub fixups: Vec<Fixup>,
}

/// A library's sites.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan<'a> {
    /// Sites that can be patched.
    pub sites: Vec<Site<'a>>,
    /// Number of sites that cannot be patched.
    pub left: u32,
}

/// Addresses in the text that are targets of jumps, one bit for each byte.
struct Targets {
    start: u64,
    bits: Vec<u64>,
}

impl Targets {
    fn add(&mut self, offset: u64) {
        if let Some(word) = self.bits.get_mut((offset.wrapping_sub(self.start) / 64) as usize) {
            *word |= 1 << (offset.wrapping_sub(self.start) % 64);
        }
    }

    fn has(&self, offset: u64) -> bool {
        let at = offset.wrapping_sub(self.start);
        self.bits.get((at / 64) as usize).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }
}

/// The kind of calls of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Makes {
    /// Calls of which some may concern the library.
    Calls,
    /// Calls that create processes and threads.
    Clones,
    /// The number is known only at run time.
    Anything,
}

impl Makes {
    /// The kind for this number; `None` if the site is not patched.
    fn of(number: Option<u64>) -> Option<Self> {
        match number {
            None => Some(Self::Anything),
            Some(SYS_RT_SIGRETURN) => None,
            Some(number) if CLONES.iter().any(|clone| u64::from(*clone) == number) => Some(Self::Clones),
            Some(number) => (*KINDS.get(number as usize)? != 0).then_some(Self::Calls),
        }
    }
}

impl Plan<'static> {
    /// Decodes a library.
    pub fn of(library: &Library) -> Self {
        let (start, text) = library.text;
        let mut decoder = Decoder::with_ip(64, text, start, DecoderOptions::NONE);
        let mut targets = Targets { start, bits: vec![0; text.len().div_ceil(64)] };
        // The last instructions. At each `syscall`, those before it are stored with it; those after it follow.
        let mut recent: Vec<Instruction> = Vec::with_capacity(2 * REACH);
        let mut found: Vec<(Vec<Instruction>, usize)> = Vec::new();
        while decoder.can_decode() {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                recent.clear();
                continue;
            }
            note_targets(&instruction, &mut targets);
            for (around, at) in found.iter_mut().rev().take(REACH) {
                let follows = around.last().is_some_and(|last| last.next_ip() == instruction.ip());
                if follows && around.len() - *at <= REACH {
                    around.push(instruction);
                }
            }
            if recent.len() == 2 * REACH {
                recent.drain(..REACH);
            }
            recent.push(instruction);
            if instruction.mnemonic() == Mnemonic::Syscall {
                let from = recent.len().saturating_sub(REACH + 1);
                found.push((recent[from..].to_vec(), recent.len() - 1 - from));
            }
        }
        let mut plan = Self::default();
        let mut end = 0;
        for (around, at) in found {
            let number = number_of(&around[..at], &targets);
            let Some(makes) = Makes::of(number) else { continue };
            let site = window(&around, at, &targets, end)
                .and_then(|(first, last)| site(library, &around[first..=last], at - first, makes));
            match site {
                Some(site) => {
                    end = site.offset + site.original.len() as u64;
                    plan.sites.push(site);
                }
                None => plan.left += 1,
            }
        }
        plan
    }
}

fn note_targets(instruction: &Instruction, targets: &mut Targets) {
    if instruction.op_count() > 0 && instruction.op0_kind() == OpKind::NearBranch64 {
        targets.add(instruction.near_branch64());
    }
    if instruction.is_ip_rel_memory_operand() {
        targets.add(instruction.ip_rel_memory_address());
    }
}

/// The number of a `syscall`, if the instructions right before it load a constant.
fn number_of(before: &[Instruction], targets: &Targets) -> Option<u64> {
    for (index, instruction) in before.iter().enumerate().rev() {
        let next = before.get(index + 1).map_or(instruction.next_ip(), Instruction::ip);
        // Code that jumps to an instruction in between may have loaded another number.
        if next != instruction.next_ip() || targets.has(instruction.next_ip()) {
            return None;
        }
        if instruction.flow_control() != FlowControl::Next {
            let passes_by = instruction.flow_control() == FlowControl::ConditionalBranch;
            if passes_by {
                continue;
            }
            return None;
        }
        let into_rax = instruction.op_count() > 0
            && instruction.op0_kind() == OpKind::Register
            && instruction.op0_register().full_register() == Register::RAX;
        if !into_rax || matches!(instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test) {
            continue;
        }
        return match instruction.code() {
            Code::Mov_r32_imm32 | Code::Mov_rm32_imm32 => Some(instruction.immediate32().into()),
            Code::Mov_rm64_imm32 => u64::try_from(instruction.immediate32to64()).ok(),
            Code::Xor_r32_rm32 | Code::Xor_rm32_r32
                if instruction.op1_kind() == OpKind::Register
                    && instruction.op1_register() == instruction.op0_register() =>
            {
                Some(0)
            }
            _ => None,
        };
    }
    None
}

/// First and last instruction of the smallest window around the instruction at `at`; it does not begin before `end`.
fn window(around: &[Instruction], at: usize, targets: &Targets, end: u64) -> Option<(usize, usize)> {
    let mut best: Option<(usize, usize, usize)> = None;
    for last in at..around.len() {
        if last > at && !movable_after(&around[at..=last], targets) {
            break;
        }
        for first in (0..=at).rev() {
            let whole = around[first..=last].windows(2).all(|pair| pair[0].next_ip() == pair[1].ip());
            let inner = around[first + 1..=last].iter().any(|one| targets.has(one.ip()));
            let moves = around[first..at].iter().all(|one| one.flow_control() == FlowControl::Next);
            if !whole || inner || !moves || around[first].ip() < end {
                break;
            }
            let bytes = (around[last].next_ip() - around[first].ip()) as usize;
            // Instructions after the call cost more.
            let cost = bytes + 16 * (last - at);
            if (JUMP_BYTES..=WINDOW_BYTES_MAX).contains(&bytes) {
                if best.is_none_or(|(cheapest, ..)| cost < cheapest) {
                    best = Some((cost, first, last));
                }
                break;
            }
        }
    }
    best.map(|(_, first, last)| (first, last))
}

/// Whether the last of these instructions can move, if the ones before it can. After an instruction that never
/// continues at the next one, only padding may follow.
fn movable_after(after: &[Instruction], targets: &Targets) -> bool {
    let (Some(last), before) = (after.last(), &after[..after.len() - 1]) else { return false };
    let over = before
        .iter()
        .any(|one| matches!(one.flow_control(), FlowControl::Return | FlowControl::UnconditionalBranch));
    if over {
        let padding = matches!(last.mnemonic(), Mnemonic::Nop | Mnemonic::Int3);
        return padding && !targets.has(last.ip());
    }
    let branches = matches!(
        last.flow_control(),
        FlowControl::Next
            | FlowControl::Return
            | FlowControl::ConditionalBranch
            | FlowControl::UnconditionalBranch
    );
    branches && last.mnemonic() != Mnemonic::Syscall
}

/// A trampoline under construction.
#[derive(Default)]
pub(super) struct Assembler {
    pub(super) code: Vec<u8>,
    pub(super) fixups: Vec<Fixup>,
}

impl Assembler {
    fn bytes(&mut self, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }

    /// Appends a 32-bit field that ends its instruction.
    fn field(&mut self, to: FixupTarget) {
        let at = self.code.len() as u8;
        self.fixups.push(Fixup { at, from: at + 4, to });
        self.bytes(&[0; 4]);
    }

    /// Appends a call of an entry, with the red zone skipped.
    pub(super) fn enter(&mut self, entry: u8) {
        self.bytes(&[0x48, 0x8d, 0x64, 0x24, 0x80]);
        self.bytes(&[0xff, 0x15]);
        self.field(FixupTarget::Entry(entry));
        self.bytes(&[0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0]);
    }

    /// Appends the `syscall` itself, between the calls before and after it.
    fn clone_around(&mut self, call: &[u8]) {
        self.enter(1);
        self.bytes(call);
        self.enter(2);
    }

    /// Appends both ways, chosen by the number in eax. Uses only rcx, which the call destroys, and no flag.
    fn either(&mut self, call: &[u8]) {
        let (mut one, mut other) = (Self::default(), Self::default());
        one.enter(0);
        other.clone_around(call);
        // jmp over the other way
        one.bytes(&[0xeb, other.code.len() as u8]);
        // lea ecx, [rax - number]; jrcxz to the other way
        const LOOK_BYTES: usize = 8;
        for (index, number) in CLONES.into_iter().enumerate() {
            let rest = (CLONES.len() - 1 - index) * LOOK_BYTES;
            self.bytes(&[0x8d, 0x88]);
            self.bytes(&number.wrapping_neg().to_le_bytes());
            self.bytes(&[0xe3, (rest + one.code.len()) as u8]);
        }
        self.append(one);
        self.append(other);
    }

    fn append(&mut self, other: Self) {
        let start = self.code.len() as u8;
        let moved = |fixup: Fixup| Fixup { at: fixup.at + start, from: fixup.from + start, ..fixup };
        self.fixups.extend(other.fixups.into_iter().map(moved));
        self.bytes(&other.code);
    }

    pub(super) fn jump(&mut self, to: u64) {
        self.bytes(&[0xe9]);
        self.field(FixupTarget::Library(to));
    }

    /// Appends an instruction of the window; `None` if it cannot run at another address.
    pub(super) fn moved(
        &mut self,
        instruction: &Instruction,
        bytes: &[u8],
        decoder: &Decoder<'_>,
    ) -> Option<()> {
        let branch = instruction.op_count() > 0 && instruction.op0_kind() == OpKind::NearBranch64;
        if branch {
            match instruction.flow_control() {
                FlowControl::UnconditionalBranch => self.bytes(&[0xe9]),
                FlowControl::ConditionalBranch if instruction.is_jcc_short_or_near() => {
                    let short = bytes.iter().find(|byte| (0x70..0x80).contains(*byte));
                    let near = bytes.iter().find(|byte| (0x80..0x90).contains(*byte));
                    let condition = if bytes.contains(&0x0f) { near } else { short };
                    self.bytes(&[0x0f, 0x80 | condition? & 0x0f]);
                }
                _ => return None,
            }
            self.field(FixupTarget::Library(instruction.near_branch64()));
            return Some(());
        }
        let start = self.code.len() as u8;
        if instruction.is_ip_rel_memory_operand() {
            let constants = decoder.get_constant_offsets(instruction);
            if constants.displacement_size() != 4 {
                return None;
            }
            let at = start + constants.displacement_offset() as u8;
            let to = FixupTarget::Library(instruction.ip_rel_memory_address());
            self.fixups.push(Fixup { at, from: start + bytes.len() as u8, to });
        }
        self.bytes(bytes);
        Some(())
    }
}

/// The site for a window whose `syscall` is its instruction `at`.
fn site(library: &Library, window: &[Instruction], at: usize, makes: Makes) -> Option<Site<'static>> {
    let (start, text) = library.text;
    let offset = window.first()?.ip();
    let end = window.last()?.next_ip();
    let mut out = Assembler::default();
    for (index, instruction) in window.iter().enumerate() {
        let from = (instruction.ip() - start) as usize;
        let bytes = &text[from..from + instruction.len()];
        if index != at {
            // Decoded again, because only the decoder knows the positions of the constants.
            let mut decoder = Decoder::with_ip(64, bytes, instruction.ip(), DecoderOptions::NONE);
            let again = decoder.decode();
            out.moved(&again, bytes, &decoder)?;
        } else {
            match makes {
                Makes::Calls => out.enter(0),
                Makes::Clones => out.clone_around(bytes),
                Makes::Anything => out.either(bytes),
            }
        }
    }
    out.jump(end);
    let original = text[(offset - start) as usize..(end - start) as usize].to_vec();
    Some(Site { offset, original: original.into(), code: out.code.into(), fixups: out.fixups })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patch::image;

    fn plan(code: &'static [u8]) -> Plan<'static> {
        Plan::of(&Library { base: 0, text: (0x1000, code), build_id: vec![1] })
    }

    #[test]
    fn the_number_and_the_call_move_together() {
        // mov eax, 1; syscall; ret
        let plan = plan(&[0xb8, 1, 0, 0, 0, 0x0f, 0x05, 0xc3]);
        assert_eq!((plan.sites.len(), plan.left), (1, 0));
        assert_eq!((plan.sites[0].offset, plan.sites[0].original.len()), (0x1000, 7));
        assert_eq!(plan.sites[0].fixups.last().unwrap().to, FixupTarget::Library(0x1007));
    }

    #[test]
    fn calls_that_never_concern_the_library_and_sigreturn_stay() {
        for number in [202, 39, 15, 12] {
            let code: &'static [u8] = Vec::leak(vec![0xb8, number, 0, 0, 0, 0x0f, 0x05, 0xc3]);
            assert_eq!(plan(code), Plan::default(), "{number}");
        }
    }

    #[test]
    fn clones_are_made_in_place() {
        let calls = |code: &[u8]| code.windows(2).filter(|two| *two == [0x0f, 0x05]).count();
        for number in CLONES {
            let [a, b, ..] = number.to_le_bytes();
            let known = plan(Vec::leak(vec![0xb8, a, b, 0, 0, 0x0f, 0x05, 0xc3]));
            assert_eq!((known.sites.len(), calls(&known.sites[0].code)), (1, 1), "{number}");
            let entries =
                known.sites[0].fixups.iter().filter(|fixup| matches!(fixup.to, FixupTarget::Entry(_)));
            assert_eq!(entries.count(), 2, "{number}: before and after");
        }
        // mov rax, rdi; mov rdi, rsi; syscall; ret
        let unknown = plan(&[0x48, 0x89, 0xf8, 0x48, 0x89, 0xf7, 0x0f, 0x05, 0xc3]);
        assert_eq!((unknown.sites.len(), calls(&unknown.sites[0].code)), (1, 1));
        let entries = unknown.sites[0].fixups.iter().filter_map(|fixup| match fixup.to {
            FixupTarget::Entry(entry) => Some(entry),
            FixupTarget::Library(_) => None,
        });
        assert_eq!(entries.collect::<Vec<_>>(), [0, 1, 2], "either way");
    }

    #[test]
    fn a_window_contains_no_jump_target() {
        // mov eax, 1; 1: syscall; cmp rax, -4; je 1b; ret
        let code = [0xb8, 1, 0, 0, 0, 0x0f, 0x05, 0x48, 0x3d, 0xfc, 0xff, 0xff, 0xff, 0x74, 0xf6, 0xc3];
        let plan = plan(Vec::leak(code.to_vec()));
        assert_eq!(plan.sites.len(), 1);
        assert_eq!(plan.sites[0].offset, 0x1005, "the window begins at the target of the jump");
    }

    #[test]
    fn instructions_that_cannot_move_stay() {
        // 1: syscall; call 1b
        let plan = plan(&[0x0f, 0x05, 0xe8, 0xf9, 0xff, 0xff, 0xff, 0xc3]);
        assert_eq!((plan.sites.len(), plan.left), (0, 1));
    }

    #[test]
    fn the_real_libraries_can_be_patched_completely() {
        let libraries = image::libraries();
        assert!(!libraries.is_empty());
        for library in libraries {
            let plan = Plan::of(&library);
            println!("{} sites, {} left", plan.sites.len(), plan.left);
            assert_eq!(plan.left, 0);
            let mut end = 0;
            for site in &plan.sites {
                assert!(site.offset >= end, "windows do not overlap");
                end = site.offset + site.original.len() as u64;
                assert!(site.original.len() >= JUMP_BYTES && site.code.len() < 200);
            }
        }
    }
}
