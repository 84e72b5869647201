//! The text of sysfs files.

use std::collections::BTreeMap;

use virtio_kfd_protocol::topology::TopologyFile;

/// A `properties` file: a line for each, name and number. Lines of another form are passed over, as are names that
/// this library does not know: a newer kernel has more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Properties(BTreeMap<String, u64>);

impl Properties {
    /// Reads the file.
    pub fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let (name, value) = line.trim().split_once(char::is_whitespace)?;
            let value = value.trim();
            // The kernel prints a few signed numbers.
            let number =
                value.parse::<u64>().or_else(|_| value.parse::<i64>().map(i64::cast_unsigned)).ok()?;
            Some((name.to_owned(), number))
        };
        Properties(text.lines().filter_map(line).collect())
    }

    /// A number, if the kernel gave it.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.0.get(name).copied()
    }

    /// A number, 0 if the kernel did not give it.
    pub fn long(&self, name: &str) -> u64 {
        self.get(name).unwrap_or(0)
    }

    /// The low half of a number, 0 if the kernel did not give it.
    pub fn word(&self, name: &str) -> u32 {
        (self.long(name) & 0xffff_ffff) as u32
    }
}

/// The host's topology files by path.
#[derive(Clone, Debug, Default)]
pub struct Files(BTreeMap<String, String>);

impl Files {
    /// Of an archive.
    pub fn new(files: Vec<TopologyFile>) -> Self {
        let text = |file: TopologyFile| (file.path, String::from_utf8_lossy(&file.content).into_owned());
        Files(files.into_iter().map(text).collect())
    }

    /// A file's text.
    pub fn text(&self, path: &str) -> Option<&str> {
        self.0.get(path).map(String::as_str)
    }

    /// A file with a single number.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.trim().parse().ok()
    }

    /// A file of properties; none where it is missing or empty.
    pub fn properties(&self, path: &str) -> Option<Properties> {
        self.text(path).filter(|text| !text.is_empty()).map(Properties::parse)
    }

    /// The numbered directories in a directory, in the order of their numbers.
    pub fn numbered(&self, directory: &str) -> Vec<u32> {
        let prefix = format!("{directory}/");
        let number = |path: &String| path.strip_prefix(&prefix)?.split_once('/')?.0.parse::<u32>().ok();
        let mut numbers: Vec<u32> = self.0.keys().filter_map(number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }
}

/// A list of numbers as sysfs writes it: `0-3,8,10-11`.
pub fn number_list(text: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        // No machine has more CPUs; a damaged file must not fill the memory.
        (last.checked_sub(first)? < 65536).then_some(first..=last)
    };
    text.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_by_name() {
        let properties = Properties::parse("simd_count 240\nhive_id 18446744073709551615\nodd\nsigned -1\n");
        assert_eq!(properties.word("simd_count"), 240);
        assert_eq!(properties.long("hive_id"), u64::MAX);
        assert_eq!(properties.word("signed"), u32::MAX);
        assert_eq!(properties.get("odd"), None);
    }

    #[test]
    fn directories_in_numeric_order() {
        let file = |path: &str| TopologyFile { path: path.into(), content: b"1\n".to_vec() };
        let files = Files::new(
            ["nodes/10/gpu_id", "nodes/9/gpu_id", "nodes/9/caches/0/properties", "generation_id"]
                .map(file)
                .to_vec(),
        );
        assert_eq!(files.numbered("nodes"), [9, 10]);
        assert_eq!(files.number("nodes/10/gpu_id"), Some(1));
        assert!(files.numbered("nodes/10/caches").is_empty());
    }

    #[test]
    fn lists_of_numbers() {
        assert_eq!(number_list("0-2,5,7-8\n"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(number_list("\n"), [] as [u32; 0]);
        assert_eq!(number_list("3-1,0-4294967295,x"), [] as [u32; 0]);
    }
}
