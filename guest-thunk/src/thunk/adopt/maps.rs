//! What lies in a range of the process: /proc/self/maps and /proc/self/smaps (proc_pid_maps(5), proc_pid_smaps(5)).
#![allow(unsafe_code, reason = "a bare system call, for the tracer")]

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::Range;

use super::proc::{self, Opened};
use super::syscall::call;

/// A mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Area {
    /// First address.
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// `rwxp` or `rwxs`, with `-` for what is not there.
    pub permissions: String,
    /// What is mapped, if it is a file.
    pub file: FilePlace,
    /// The file's name, or what the kernel calls the mapping.
    pub name: String,
    /// Two-letter flags, where they were asked for.
    pub flags: Vec<String>,
    /// Its protection key.
    pub key: u32,
}

/// Bytes of a file. All zeros for none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilePlace {
    /// Device, as the kernel prints it.
    pub device: String,
    /// Number of the file on the device.
    pub inode: u64,
    /// Byte of the file at the first address.
    pub offset: u64,
}

impl FilePlace {
    /// So many bytes further on.
    pub fn after(&self, bytes: u64) -> FilePlace {
        FilePlace { offset: self.offset.wrapping_add(bytes), ..self.clone() }
    }
}

impl Area {
    /// The part of it in a range.
    pub fn within(&self, range: &Range<u64>) -> Range<u64> {
        self.start.max(range.start)..self.end.min(range.end)
    }

    /// Leaves out what lies below an address.
    pub(super) fn begin_at(&mut self, address: u64) {
        if address > self.start {
            if self.file.inode != 0 {
                self.file = self.file_at(address);
            }
            self.start = address;
        }
    }

    /// What may be done with it, as mmap(2) is told.
    pub fn access(&self) -> i32 {
        access_of(self.permissions.as_bytes())
    }

    /// What of the file lies at an address.
    pub fn file_at(&self, address: u64) -> FilePlace {
        self.file.after(address.wrapping_sub(self.start))
    }
}

/// Of the letters that the kernel prints.
fn access_of(permissions: &[u8]) -> i32 {
    let letters = [(b'r', libc::PROT_READ), (b'w', libc::PROT_WRITE), (b'x', libc::PROT_EXEC)];
    let given = letters.iter().filter(|(letter, _)| permissions.contains(letter));
    given.fold(libc::PROT_NONE, |access, (_, bit)| access | bit)
}

/// The mappings that a range touches, in order.
pub fn areas(range: &Range<u64>) -> io::Result<Vec<Area>> {
    let file = proc::MAPS.open()?;
    let found = parse(BufReader::with_capacity(64 << 10, Bare::new(&file)), range)?;
    file.check()?;
    Ok(found)
}

/// The same with flags and keys. The kernel looks at every page to make these, so this is slow in large processes.
pub fn areas_with_flags(range: &Range<u64>) -> io::Result<Vec<Area>> {
    parse(BufReader::with_capacity(64 << 10, File::open("/proc/self/smaps")?), range)
}

fn parse(mut text: impl BufRead, range: &Range<u64>) -> io::Result<Vec<Area>> {
    let mut found: Vec<Area> = Vec::new();
    let (mut inside, mut any) = (false, false);
    let mut line = String::new();
    loop {
        line.clear();
        if text.read_line(&mut line)? == 0 {
            // A process has mappings.
            return if any { Ok(found) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        any = true;
        if let Some(mut area) = parse_area(&line) {
            // Mappings that are divided or become one meanwhile are told of twice, from the address on where the last one ended.
            if let Some(before) = found.last() {
                area.begin_at(before.end);
            }
            if area.start >= range.end {
                return Ok(found);
            }
            inside = area.end > range.start && area.start < area.end;
            if inside {
                found.push(area);
            }
            continue;
        }
        let Some(area) = found.last_mut().filter(|_| inside) else { continue };
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            area.flags = flags.split_whitespace().map(str::to_owned).collect();
        } else if let Some(key) = line.strip_prefix("ProtectionKey:") {
            area.key = key.trim().parse().unwrap_or(u32::MAX);
        }
    }
}

/// `start-end permissions offset device inode name`
fn parse_area(line: &str) -> Option<Area> {
    let mut rest = line.trim_end_matches('\n');
    let mut field = || {
        let (field, after) = rest.split_once(' ').unwrap_or((rest, ""));
        rest = after.trim_start();
        field
    };
    let (start, end) = field().split_once('-')?;
    let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = (hexadecimal(start)?, hexadecimal(end)?);
    let permissions = field().to_owned();
    let offset = hexadecimal(field())?;
    let device = field().to_owned();
    let inode = field().parse().ok()?;
    let file = FilePlace { device, inode, offset };
    Some(Area { start, end, permissions, file, name: rest.to_owned(), flags: Vec::new(), key: 0 })
}

/// The process's mappings, to be read once, later, when nothing may allocate.
pub struct Later {
    file: Opened,
}

/// A line of /proc/self/maps, but for the name.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line {
    start: u64,
    end: u64,
    permissions: Word,
    offset: u64,
    device: Word,
    inode: u64,
}

/// A short field.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    bytes: [u8; 16],
    length: usize,
}

impl Word {
    fn push(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.length) {
            *place = byte;
        }
        self.length = self.length.saturating_add(1);
    }

    /// What is longer than the place for it is like nothing.
    fn is(&self, expected: &[u8]) -> bool {
        self.bytes.get(..self.length) == Some(expected)
    }
}

impl Line {
    /// Takes a byte of the line's field with this number.
    fn take(&mut self, field: u32, byte: u8) {
        let digit = |number: u64, radix: u64| {
            let digit = char::from(byte).to_digit(16).map_or(0, u64::from);
            number.wrapping_mul(radix).wrapping_add(digit)
        };
        match field {
            0 => self.start = digit(self.start, 16),
            1 => self.end = digit(self.end, 16),
            2 => self.permissions.push(byte),
            3 => self.offset = digit(self.offset, 16),
            4 => self.device.push(byte),
            5 => self.inode = digit(self.inode, 10),
            _ => {}
        }
    }

    /// What may be done with it, as mmap(2) is told.
    pub fn access(&self) -> i32 {
        access_of(self.permissions.bytes.get(..self.permissions.length).unwrap_or_default())
    }

    /// Whether it is private memory, to be read and written.
    pub fn is_private(&self) -> bool {
        self.permissions.is(b"rw-p")
    }

    /// Whether that is of no file.
    pub fn is_plain(&self) -> bool {
        self.is_private() && self.inode == 0
    }

    /// Whether a file lies at an address, from so many bytes behind this place of it on.
    pub fn has(&self, place: &FilePlace, address: u64, behind: u64) -> bool {
        self.inode == place.inode
            && self.device.is(place.device.as_bytes())
            && self.offset.wrapping_add(address.wrapping_sub(self.start)) == place.offset.wrapping_add(behind)
    }
}

impl Later {
    /// Opens it.
    pub fn open() -> io::Result<Later> {
        Ok(Later { file: proc::MAPS.open()? })
    }

    /// Whether all of some ranges, which are in order, is mapped, and each mapping there is as it should be: `fits` is
    /// asked for the first address of each mapping in each range. Neither allocates nor locks. Can be asked once.
    pub fn fits<T>(
        &self,
        ranges: &[(Range<u64>, T)],
        fits: impl Fn(&T, &Range<u64>, &Line, u64) -> bool,
    ) -> io::Result<bool> {
        fits_all(&mut Bare::new(&self.file), ranges, fits)
    }
}

/// Read by bare calls: the C library's is a point of cancellation, which means the thread whose thread pointer it is.
/// From the start, wherever the file's position is.
struct Bare<'a> {
    file: &'a Opened,
    at: usize,
}

impl<'a> Bare<'a> {
    fn new(file: &'a Opened) -> Bare<'a> {
        Bare { file, at: 0 }
    }
}

impl Read for Bare<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let place = buffer.as_mut_ptr().expose_provenance();
        let descriptor = self.file.descriptor() as usize;
        // SAFETY: the buffer is exclusive, as large as is said, and valid whatever is written.
        let read = unsafe { call(libc::SYS_pread64, [descriptor, place, buffer.len(), self.at]) }
            .map_err(io::Error::from_raw_os_error)?;
        self.at = self.at.saturating_add(read);
        Ok(read)
    }
}

fn fits_all<T>(
    text: &mut impl Read,
    ranges: &[(Range<u64>, T)],
    fits: impl Fn(&T, &Range<u64>, &Line, u64) -> bool,
) -> io::Result<bool> {
    let mut ranges = ranges.iter();
    let Some((mut range, mut expected)) = ranges.next().map(|(range, it)| (range.clone(), it)) else {
        return Ok(true);
    };
    let mut whole = range.clone();
    let mut buffer = [0u8; 4096];
    let (mut line, mut field) = (Line::default(), 0u32);
    loop {
        let filled = text.read(&mut buffer)?;
        if filled == 0 {
            return Ok(false);
        }
        for byte in buffer.get(..filled).unwrap_or_default() {
            match byte {
                b'\n' => {}
                b'-' if field == 0 => {
                    field = 1;
                    continue;
                }
                b' ' => {
                    field = field.saturating_add(1);
                    continue;
                }
                _ => {
                    line.take(field, *byte);
                    continue;
                }
            }
            while range.start < line.end {
                if line.start > range.start || !fits(expected, &whole, &line, range.start) {
                    return Ok(false);
                }
                range.start = line.end.min(range.end);
                if range.start < range.end {
                    break;
                }
                let Some((next, it)) = ranges.next() else { return Ok(true) };
                (range, whole, expected) = (next.clone(), next.clone(), it);
            }
            (line, field) = (Line::default(), 0);
        }
    }
}

/// What the fresh mapping has to be like when a range is given back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Character {
    /// Flags out of [`KEPT`].
    pub flags: Vec<String>,
    /// `[anon:...]`, if it has such a name.
    pub name: Option<String>,
}

/// Flags of ordinary memory, and which of them are kept: no reserve, huge pages or none, mergeable, not in core dumps.
const ORDINARY: [&str; 8] = ["rd", "wr", "mr", "mw", "me", "ac", "sd", "nr"];
const ADVICE: [&str; 4] = ["hg", "nh", "mg", "dd"];
/// Of the main thread's stack: the kernel extends it downwards.
const GROWS: &str = "gd";
/// The flags that a fresh mapping is given as well.
pub const KEPT: [&str; 5] = ["nr", "hg", "nh", "mg", "dd"];

/// What is adopted.
#[derive(Clone, Copy)]
pub enum Fit<'a> {
    /// Ordinary anonymous memory.
    Ordinary,
    /// Also the main thread's stack, and the files' pages for which this answers yes: data of programs and libraries.
    Variables(&'a dyn Fn(&Range<u64>) -> bool),
}

/// A range that can be adopted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vetted {
    /// What has to be put back.
    pub character: Character,
    /// What lies in which part of it, in order.
    pub places: Vec<(Range<u64>, FilePlace)>,
    /// The kernel extends a part of it downwards.
    pub grows: bool,
}

/// Why a range is not adopted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Nothing is mapped at this address.
    Hole(u64),
    /// It is not ordinary private memory: where, and what it is.
    Kind(u64, String),
}

/// Looks at a range of whole pages: it has to be fit everywhere, and ordinary memory of one character.
pub fn vet(range: &Range<u64>, fit: Fit) -> io::Result<Result<Vetted, Unfit>> {
    Ok(judge(&areas_with_flags(range)?, range, fit))
}

/// The first address of a range where nothing is mapped.
pub fn hole(range: &Range<u64>) -> io::Result<Option<u64>> {
    Ok(first_hole(&areas(range)?, range))
}

fn first_hole(areas: &[Area], range: &Range<u64>) -> Option<u64> {
    let mut next = range.start;
    for area in areas {
        if area.start > next {
            return Some(next);
        }
        next = area.end;
    }
    (next < range.end).then_some(next)
}

fn judge(areas: &[Area], range: &Range<u64>, fit: Fit) -> Result<Vetted, Unfit> {
    if let Some(hole) = first_hole(areas, range) {
        return Err(Unfit::Hole(hole));
    }
    let mut character = None;
    let mut places = Vec::new();
    for area in areas {
        let piece = area.within(range);
        let this =
            characterize(area, &piece, fit).map_err(|what| Unfit::Kind(piece.start, what.into_owned()))?;
        // With variables everything is kept as it was.
        let alike = matches!(fit, Fit::Variables(_));
        if character.get_or_insert_with(|| this.clone()) != &this && !alike {
            let what = "its attributes change within the range".to_owned();
            return Err(Unfit::Kind(area.start, what));
        }
        let place = if area.file.inode == 0 { FilePlace::default() } else { area.file_at(piece.start) };
        places.push((piece, place));
    }
    let grows = areas.iter().any(|area| area.flags.iter().any(|flag| flag == GROWS));
    Ok(Vetted { character: character.unwrap_or_default(), places, grows })
}

/// What private memory is like that is fit, or what it is instead.
fn characterize(area: &Area, piece: &Range<u64>, fit: Fit) -> Result<Character, Cow<'static, str>> {
    if area.permissions != "rw-p" {
        return Err(format!("its permissions are {}, expected rw-p", area.permissions).into());
    }
    let named = area.name.starts_with("[anon:");
    let (stacks, data) = match fit {
        Fit::Ordinary => (false, false),
        Fit::Variables(is_data) => (true, area.file.inode != 0 && is_data(piece)),
    };
    let anonymous = area.file.inode == 0
        && (area.name.is_empty() || area.name == "[heap]" || named || (stacks && area.name == "[stack]"));
    if !(anonymous || data) {
        return Err(format!("it is {}, expected anonymous memory", area.name).into());
    }
    if area.flags.is_empty() {
        return Err("the kernel does not tell its flags".into());
    }
    let strange = |flag: &&String| {
        let flag = flag.as_str();
        !(ORDINARY.contains(&flag) || ADVICE.contains(&flag) || (stacks && flag == GROWS))
    };
    if let Some(flag) = area.flags.iter().find(strange) {
        return Err(format!("it has the flag {flag} (VmFlags of /proc/self/smaps)").into());
    }
    if area.key != 0 {
        return Err(format!("it has protection key {}", area.key).into());
    }
    let flags = area.flags.iter().filter(|flag| KEPT.contains(&flag.as_str())).cloned().collect();
    Ok(Character { flags, name: named.then(|| area.name.clone()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c000-55d2d000 rw-p 00000000 00:00 0                          [heap]
Size:                132 kB
VmFlags: rd wr mr mw me ac sd
ProtectionKey:         0
7f0000000000-7f0000004000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me ac sd
7f0000004000-7f0000006000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me ac
7f0000006000-7f0000008000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me lo ac
7f0000010000-7f0000020000 rw-s 00012000 00:05 1025                       /memfd:a name (deleted)
VmFlags: rd wr sh mr mw me ms sd
7f8000000000-7f8000002000 rw-p 00003000 08:01 77                         /usr/bin/program
VmFlags: rd wr mr mw me ac sd
7f8000002000-7f8000003000 rw-p 00000000 00:00 0
VmFlags: rd wr mr mw me ac sd
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
VmFlags: rd wr mr mw me gd ac
";

    fn judged(range: Range<u64>) -> Result<Character, Unfit> {
        let areas = parse(SMAPS.as_bytes(), &range).unwrap();
        judge(&areas, &range, Fit::Ordinary).map(|vetted| vetted.character)
    }

    /// Another thread gives the second and third page back what it had taken from the second, while this is read.
    #[test]
    fn mappings_that_become_one_meanwhile() {
        let text = "\
7f0000010000-7f0000011000 rw-s 00012000 00:05 1025                       /memfd:a name (deleted)
7f0000011000-7f0000012000 ---s 00013000 00:05 1025                       /memfd:a name (deleted)
7f0000010000-7f0000020000 rw-s 00012000 00:05 1025                       /memfd:a name (deleted)
7f0000011000-7f0000012000 rw-s 00013000 00:05 1025                       /memfd:a name (deleted)
";
        let areas = parse(text.as_bytes(), &(0x7f0000010000..0x7f0000020000)).unwrap();
        let found: Vec<_> = areas.iter().map(|it| (it.start, it.end, it.file.offset, it.access())).collect();
        let (all, none) = (libc::PROT_READ | libc::PROT_WRITE, libc::PROT_NONE);
        assert_eq!(
            found,
            [
                (0x7f0000010000, 0x7f0000011000, 0x12000, all),
                (0x7f0000011000, 0x7f0000012000, 0x13000, none),
                (0x7f0000012000, 0x7f0000020000, 0x14000, all)
            ]
        );
    }

    #[test]
    fn lines_of_smaps() {
        let range = 0x7f0000011000..0x7f0000012000;
        let [area] = &parse(SMAPS.as_bytes(), &range).unwrap()[..] else { panic!() };
        assert_eq!((area.file.inode, area.file.device.as_str()), (1025, "00:05"));
        assert_eq!(area.name, "/memfd:a name (deleted)");
        assert_eq!(area.file_at(0x7f0000011000).offset, 0x13000);
        assert_eq!(area.flags.len(), 8);
        assert_eq!(area.within(&range), range);
    }

    #[test]
    fn only_ordinary_private_memory_is_fit() {
        assert_eq!(judged(0x55d0c000..0x55d0d000), Ok(Character::default()));
        assert_eq!(judged(0x7f0000003000..0x7f0000005000), Ok(Character::default()), "two mappings alike");
        let kind = |range| matches!(judged(range), Err(Unfit::Kind(..)));
        assert!(kind(0x7f0000005000..0x7f0000007000), "locked");
        assert!(kind(0x7f0000010000..0x7f0000011000), "shared");
        assert!(kind(0x7ffc00000000..0x7ffc00001000), "a stack");
        assert_eq!(judged(0x7f000000a000..0x7f000000b000), Err(Unfit::Hole(0x7f000000a000)));
        assert_eq!(judged(0x55d2c000..0x55d2e000), Err(Unfit::Hole(0x55d2d000)));
        assert_eq!(judged(0x7f0000005000..0x7f000000b000), Err(Unfit::Hole(0x7f0000008000)), "whatever else");
    }

    /// With the further option.
    #[test]
    fn stacks_and_data_of_programs_are_variables() {
        let judged = |range: Range<u64>, is_data: bool| {
            judge(&parse(SMAPS.as_bytes(), &range).unwrap(), &range, Fit::Variables(&|_| is_data))
        };
        let kind = |range, is_data| matches!(judged(range, is_data), Err(Unfit::Kind(..)));
        let stack = judged(0x7ffc00001000..0x7ffc00002000, false).unwrap();
        assert!(stack.grows);
        let data = 0x7f8000001000..0x7f8000003000;
        assert!(kind(data.clone(), false), "any other file");
        let vetted = judged(data, true).unwrap();
        let place = FilePlace { device: "08:01".into(), inode: 77, offset: 0x4000 };
        let places =
            [(0x7f8000001000..0x7f8000002000, place), (0x7f8000002000..0x7f8000003000, FilePlace::default())];
        assert_eq!((vetted.grows, &vetted.places[..]), (false, &places[..]));
        assert!(kind(0x7f0000005000..0x7f0000007000, true), "locked");
        assert!(kind(0x7f0000010000..0x7f0000011000, true), "shared");
    }

    const MAPS: &str = "\
7f0000000000-7f0000004000 rw-p 00000000 00:00 0
7f0000004000-7f0000006000 rw-p 00000000 00:00 0                          [anon:a name - with 1 line]
7f0000008000-7f000000a000 rw-s 00012000 103:05 1025                      /dev/dri/renderD128
7f000000a000-7f000000b000 rw-p 00000000 00:00 0
";

    /// Reads a few bytes at a time.
    struct Slow<'a>(&'a [u8]);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let length = buffer.len().min(7);
            self.0.read(&mut buffer[..length])
        }
    }

    #[test]
    fn mappings_are_compared_later() {
        let plain = |ranges: &[Range<u64>]| {
            let ranges: Vec<_> = ranges.iter().map(|range| (range.clone(), ())).collect();
            fits_all(&mut Slow(MAPS.as_bytes()), &ranges, |(), _, line, _| line.is_plain()).unwrap()
        };
        let one = |start, end| plain(std::slice::from_ref(&(start..end)));
        assert!(plain(&[]));
        assert!(one(0x7f0000003000, 0x7f0000005000), "two mappings");
        assert!(!one(0x7f0000003000, 0x7f0000007000), "a hole at the end");
        assert!(!one(0x7f0000006000, 0x7f0000009000), "a hole at the start");
        assert!(!one(0x7f0000008000, 0x7f0000009000), "shared, and a file");
        assert!(!one(0x7f000000a000, 0x7f000000c000), "beyond the last");
        assert!(plain(&[
            0x7f0000000000..0x7f0000001000,
            0x7f0000002000..0x7f0000006000,
            0x7f000000a000..0x7f000000b000
        ]));
        assert!(!plain(&[0x7f0000000000..0x7f0000001000, 0x7f0000008000..0x7f0000009000]));

        let place = FilePlace { device: "103:05".into(), inode: 1025, offset: 0x13000 };
        let lies = |place: &FilePlace| {
            let range = 0x7f0000009000..0x7f000000a000;
            let fits = |place: &FilePlace, range: &Range<u64>, line: &Line, at: u64| {
                line.has(place, at, at - range.start)
            };
            fits_all(&mut Slow(MAPS.as_bytes()), &[(range, place.clone())], fits).unwrap()
        };
        assert!(lies(&place));
        assert!(!lies(&place.after(0x1000)));
        assert!(!lies(&FilePlace { inode: 1026, ..place.clone() }));
        assert!(!lies(&FilePlace { device: "103:0".into(), ..place.clone() }));
        assert!(!lies(&FilePlace { device: "103:05103:05103:05".into(), ..place }));
    }

    #[test]
    fn this_process() {
        let page = crate::thunk::memory::address::page_size();
        let buffer = vec![1u8; 1 << 20];
        let start = (buffer.as_ptr().addr() as u64).next_multiple_of(page);
        let vetted = vet(&(start..start + 4 * page), Fit::Ordinary).unwrap();
        assert_eq!(vetted.map(|it| it.character.name), Ok(None));
        let code = (judged as fn(_) -> _ as usize as u64) / page * page;
        assert!(matches!(vet(&(code..code + page), Fit::Ordinary).unwrap(), Err(Unfit::Kind(..))));
    }
}
