//! The tables of `docs/media-format.md` against the definitions in `format`: a layout is described once, in the
//! source, and the document shows the same. The tables are rendered from the source text; set
//! `HEARTH_WRITE_DOCS=1` to have them written into the document, between the head and the end of each section.

use std::collections::BTreeMap;

/// One definition that has a table, in the order of the source.
enum Item {
    Struct { name: String, docs: String, fields: Vec<Field> },
    Enum { name: String, docs: String, raw: String, variants: Vec<(String, String, String)> },
}

struct Field {
    name: String,
    kind: String,
    docs: String,
}

/// The definitions of one module of `format`.
#[derive(Default)]
pub struct Module {
    items: Vec<Item>,
    constants: Vec<(String, String, String)>,
    identifiers: Vec<(String, usize, String)>,
    asserted: BTreeMap<String, String>,
}

/// Sizes of the types that may stand in a structure, and values of the constants that sizes are made of.
#[derive(Default)]
pub struct Sizes {
    types: BTreeMap<String, usize>,
    constants: BTreeMap<String, usize>,
}

impl Sizes {
    /// The value of a constant expression: a number, a constant met before, or a sum, difference or product of them.
    fn value(&self, expression: &str) -> Option<usize> {
        for (sign, apply) in [
            (" - ", usize::checked_sub as fn(usize, usize) -> Option<usize>),
            (" + ", usize::checked_add),
            (" * ", usize::checked_mul),
        ] {
            if let Some((left, right)) = expression.rsplit_once(sign) {
                return apply(self.value(left)?, self.value(right)?);
            }
        }
        let plain = expression.split(" as ").next().unwrap_or_default().replace('_', "");
        plain.parse().ok().or_else(|| self.constants.get(expression).copied())
    }

    /// The size of a type: a raw one, an identifier, an array of bytes, a structure met before.
    fn of(&self, kind: &str) -> Option<usize> {
        if let Some(bytes) = kind.strip_prefix("[u8; ").and_then(|k| k.strip_suffix(']')) {
            return self.value(bytes);
        }
        match kind {
            "u8" => Some(1),
            "U16" => Some(2),
            "U32" => Some(4),
            "U64" | "I64" => Some(8),
            _ => self.types.get(kind).copied(),
        }
    }
}

impl Module {
    /// Reads the definitions of a module; its tests are not looked at.
    pub fn parse(text: &str) -> Self {
        let mut module = Self::default();
        let lines: Vec<&str> = text.lines().take_while(|l| *l != "#[cfg(test)]").collect();
        let (mut docs, mut repr) = (String::new(), String::new());
        let mut at = 0;
        while at < lines.len() {
            let line = lines[at].trim();
            at += 1;
            if let Some(doc) = line.strip_prefix("///") {
                docs = join(&docs, doc);
                continue;
            }
            if let Some(kind) = line.strip_prefix("#[repr(") {
                repr = kind.trim_end_matches(")]").to_string();
                continue;
            }
            let body_end = at + lines[at..].iter().position(|l| *l == "}").unwrap_or(0);
            if let Some(name) = line.strip_prefix("pub struct ").and_then(|l| l.strip_suffix(" {"))
                && repr == "C"
            {
                let fields = members(&lines[at..body_end]).filter_map(|(d, l)| field(d, l)).collect();
                module.items.push(Item::Struct { name: name.to_string(), docs: docs.clone(), fields });
            } else if let Some(name) = line.strip_prefix("pub enum ").and_then(|l| l.strip_suffix(" {"))
                && matches!(repr.as_str(), "u8" | "u16" | "u32")
            {
                let variants = members(&lines[at..body_end]).filter_map(|(d, l)| variant(d, l)).collect();
                let raw = repr.clone();
                module.items.push(Item::Enum { name: name.to_string(), docs: docs.clone(), raw, variants });
            } else if let Some(rest) = line.strip_prefix("pub const ").filter(|r| !r.starts_with("fn ")) {
                module.constants.extend(constant(rest, &docs).filter(|_| !lines[at - 1].starts_with(' ')));
            } else if line.starts_with("const _: () = assert!(size_of::<") {
                let name = between(line, "size_of::<", ">()").unwrap_or_default();
                let size = between(line, "== ", ");").unwrap_or_default();
                module.asserted.entry(name.to_string()).or_insert(size.to_string());
            } else if let Some((name, raw)) = line.split_once(", ").filter(|_| lines[at] == ");") {
                let bytes = if raw.starts_with("U64") { 8 } else { 4 };
                module.identifiers.push((name.to_string(), bytes, docs.clone()));
            }
            if !line.starts_with("#[") && !line.starts_with("id!(") && !line.ends_with("derive(") {
                docs.clear();
                repr.clear();
            }
            // A derive over several lines stands between the comment and the definition.
            if line.starts_with("#[derive(") && !line.ends_with(")]") {
                at += lines[at..].iter().position(|l| l.trim() == ")]").map_or(0, |end| end + 1);
            }
        }
        module
    }

    /// Adds the sizes of what the module defines, as far as they are known by now.
    pub fn measure(&self, sizes: &mut Sizes) {
        sizes.types.extend(self.identifiers.iter().map(|(name, bytes, _)| (name.clone(), *bytes)));
        for (name, expression, _) in &self.constants {
            if let Some(value) = sizes.value(expression) {
                sizes.constants.insert(name.clone(), value);
            }
        }
        for item in &self.items {
            if let Item::Struct { name, fields, .. } = item
                && let Some(total) = fields.iter().map(|f| sizes.of(&f.kind)).sum::<Option<usize>>()
            {
                sizes.types.insert(name.clone(), total);
            }
        }
    }

    /// The module's tables.
    ///
    /// # Errors
    /// A structure whose size is not known, is not asserted, or is asserted to be another.
    pub fn render(&self, sizes: &Sizes) -> Result<String, String> {
        let mut text = String::new();
        if !self.identifiers.is_empty() {
            text += "### Identifiers\n\n| identifier | bytes | meaning |\n| --- | --- | --- |\n";
            for (name, bytes, docs) in &self.identifiers {
                text += &format!("| `{name}` | {bytes} | {docs} |\n");
            }
            text += "\n";
        }
        for item in &self.items {
            text += &match item {
                Item::Struct { name, docs, fields } => self.render_struct(name, docs, fields, sizes)?,
                Item::Enum { name, docs, raw, variants } => render_enum(name, docs, raw, variants),
            };
        }
        if !self.constants.is_empty() {
            text += "### Constants\n\n| constant | value | meaning |\n| --- | --- | --- |\n";
            for (name, value, docs) in &self.constants {
                text += &format!("| `{name}` | `{value}` | {docs} |\n");
            }
            text += "\n";
        }
        Ok(text)
    }

    fn render_struct(
        &self,
        name: &str,
        docs: &str,
        fields: &[Field],
        sizes: &Sizes,
    ) -> Result<String, String> {
        let total = sizes.of(name).ok_or(format!("{name}: a field has a type of unknown size"))?;
        let asserted =
            self.asserted.get(name).ok_or(format!("{name}: no assertion of its size stands by it"))?;
        if sizes.value(asserted) != Some(total) {
            return Err(format!(
                "{name}: its size is asserted to be {asserted}, its fields have {total} bytes"
            ));
        }
        let mut text = format!("### `{name}`, {total} bytes\n\n{docs}\n\n");
        text += "| offset | bytes | field | type | meaning |\n| --- | --- | --- | --- | --- |\n";
        let mut offset = 0;
        for Field { name, kind, docs } in fields {
            let bytes = sizes.of(kind).expect("the sum of the fields is known");
            text += &format!("| {offset} | {bytes} | `{name}` | `{kind}` | {docs} |\n");
            offset += bytes;
        }
        Ok(text + "\n")
    }
}

fn render_enum(name: &str, docs: &str, raw: &str, variants: &[(String, String, String)]) -> String {
    let mut text =
        format!("### `{name}`, a `{raw}`\n\n{docs}\n\n| number | name | meaning |\n| --- | --- | --- |\n");
    for (name, number, docs) in variants {
        text += &format!("| {number} | `{name}` | {docs} |\n");
    }
    text + "\n"
}

/// The members of a definition: each line that declares one, with the comment above it.
fn members<'a>(lines: &'a [&'a str]) -> impl Iterator<Item = (String, &'a str)> + 'a {
    let mut docs = String::new();
    lines.iter().filter_map(move |line| match line.trim().strip_prefix("///") {
        Some(doc) => {
            docs = join(&docs, doc);
            None
        }
        None => Some((std::mem::take(&mut docs), line.trim())),
    })
}

fn field(docs: String, line: &str) -> Option<Field> {
    let (name, kind) = line.trim_end_matches(',').split_once(": ")?;
    let name = name.trim_start_matches("pub ").to_string();
    Some(Field { name, kind: kind.to_string(), docs })
}

fn variant(docs: String, line: &str) -> Option<(String, String, String)> {
    let (name, number) = line.trim_end_matches(',').split_once(" = ")?;
    Some((name.to_string(), number.to_string(), docs))
}

fn constant(rest: &str, docs: &str) -> Option<(String, String, String)> {
    let (name, rest) = rest.split_once(": ")?;
    let (_, value) = rest.split_once(" = ")?;
    Some((name.to_string(), value.trim_end_matches(';').to_string(), docs.to_string()))
}

fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    text.split_once(from)?.1.split_once(to).map(|(inside, _)| inside)
}

/// Adds a line of a comment; links of rustdoc become plain names, and a bar would end a cell.
fn join(docs: &str, line: &str) -> String {
    let plain = line.trim().replace("[`", "`").replace("`]", "`").replace("`crate::", "`").replace('|', "or");
    if docs.is_empty() { plain } else { format!("{docs} {plain}") }
}

/// The tables of a module as the document has them: from the first `### ` of its section to the section's end.
/// `None` if there is no such section.
pub fn section<'a>(document: &'a str, module: &str) -> Option<(&'a str, std::ops::Range<usize>)> {
    let head = format!("\n## `{module}`");
    let start = document.find(&head)? + 1;
    let end = document[start..].find("\n## ").map_or(document.len(), |at| start + at + 1);
    let tables = document[start..end].find("\n### ").map_or(end, |at| start + at + 1);
    Some((&document[tables..end], tables..end))
}

/// The differences between the document and the tables of all modules, `(name, rendered)`.
pub fn compare(document: &str, tables: &[(String, String)]) -> Vec<String> {
    let mut found = Vec::new();
    for (module, rendered) in tables {
        match section(document, module) {
            None if rendered.is_empty() => {}
            None => found.push(format!("docs/media-format.md has no section for `{module}`")),
            Some((shown, _)) if shown.trim() == rendered.trim() => {}
            Some((shown, _)) => {
                let differs =
                    rendered.lines().find(|l| !shown.lines().any(|s| s == *l)).unwrap_or("a line too many");
                found.push(format!(
                    "docs/media-format.md, `{module}`, is not what format says, first at `{differs}`: a layout \
                     that is described twice is described wrongly once (HEARTH_WRITE_DOCS=1 cargo test --test \
                     tidy writes the tables)"
                ));
            }
        }
    }
    for head in document.lines().filter_map(|l| l.strip_prefix("## `")) {
        let module = head.split('`').next().unwrap_or_default();
        if !tables.iter().any(|(name, _)| name == module) {
            found.push(format!("docs/media-format.md describes `{module}`, which format does not have"));
        }
    }
    found
}

/// The document with the tables of all modules put in their place; a module without section gets one at the end.
pub fn rewrite(document: &str, tables: &[(String, String)]) -> String {
    let mut document = document.to_string();
    for (module, rendered) in tables.iter().filter(|(_, rendered)| !rendered.is_empty()) {
        if section(&document, module).is_none() {
            document = format!("{}\n\n## `{module}`\n\n", document.trim_end());
        }
        if let Some((_, range)) = section(&document, module) {
            let end = if range.end == document.len() { "" } else { "\n" };
            document.replace_range(range, &format!("{}\n{end}", rendered.trim_end()));
        }
    }
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "//! M.\n\n/// How many.\npub const MANY: usize = 1_6;\n\n/// Kinds.\n#[derive(Clone)]\n\
        #[repr(u8)]\npub enum Kind {\n    /// The [`First`].\n    First = 1,\n}\n\n/// A head,\n/// in two lines.\n\
        #[derive(\n    Clone,\n)]\n#[repr(C)]\npub struct Head {\n    /// Sum.\n    pub sum: U32,\n    /// Zero.\n    \
        pub rest: [u8; MANY - 4],\n}\n\nconst _: () = assert!(size_of::<Head>() == 16);\n";

    const DOCUMENT: &str = "# Format\n\n## `m`: something\n\nProse.\n\n### `Kind`, a `u8`\n\nKinds.\n\n\
        | number | name | meaning |\n| --- | --- | --- |\n| 1 | `First` | The `First`. |\n\n### `Head`, 16 bytes\n\n\
        A head, in two lines.\n\n| offset | bytes | field | type | meaning |\n| --- | --- | --- | --- | --- |\n\
        | 0 | 4 | `sum` | `U32` | Sum. |\n| 4 | 12 | `rest` | `[u8; MANY - 4]` | Zero. |\n\n### Constants\n\n\
        | constant | value | meaning |\n| --- | --- | --- |\n| `MANY` | `1_6` | How many. |\n\n## The end\n";

    fn tables(source: &str) -> Vec<(String, String)> {
        let module = Module::parse(source);
        let mut sizes = Sizes::default();
        module.measure(&mut sizes);
        vec![("m".to_string(), module.render(&sizes).unwrap())]
    }

    #[test]
    fn the_document_that_fits_is_let_through() {
        assert_eq!(compare(DOCUMENT, &tables(SOURCE)), Vec::<String>::new());
    }

    #[test]
    fn any_change_of_the_source_shows() {
        for (old, new) in [
            ("sum: U32", "sum: U16"),
            ("rest: [u8", "more: [u8"),
            ("First = 1", "First = 2"),
            ("usize = 1_6", "usize = 16"),
            ("How many", "How much"),
            ("    /// Sum.\n    pub sum: U32,\n", ""),
        ] {
            let changed =
                SOURCE.replace(old, new).replace("== 16", if new.is_empty() { "== 12" } else { "== 16" });
            let changed = if old == "sum: U32" { changed.replace("== 16", "== 14") } else { changed };
            let tables = tables(&changed);
            assert_eq!(compare(DOCUMENT, &tables).len(), 1, "{old} -> {new}");
            let mended = rewrite(DOCUMENT, &tables);
            assert_eq!(compare(&mended, &tables), Vec::<String>::new(), "{mended}");
            assert!(mended.ends_with("\n\n## The end\n") && mended.contains("\n\nProse.\n\n### "));
        }
    }

    #[test]
    fn a_wrong_or_missing_size_shows() {
        for (old, new) in [("== 16", "== 20"), ("const _", "const X"), ("U32", "Unknown")] {
            let module = Module::parse(&SOURCE.replace(old, new));
            let mut sizes = Sizes::default();
            module.measure(&mut sizes);
            assert!(module.render(&sizes).is_err(), "{old} -> {new}");
        }
    }

    #[test]
    fn a_section_too_many_or_too_few_shows() {
        let more = DOCUMENT.replace("## The end", "## `n`: gone");
        assert_eq!(compare(&more, &tables(SOURCE)).len(), 1);
        assert_eq!(compare("# Format\n", &tables(SOURCE)).len(), 1);
        assert!(compare(&rewrite("# Format\n", &tables(SOURCE)), &tables(SOURCE)).is_empty());
    }
}
